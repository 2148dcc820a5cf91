//! [`AmxUnit`]: the trait of AMX and its models. An operand is sixteen rows of sixteen words, each two bfloat16.
//!
//! One operation computes both products: each step adds products of two operands of A and two of B to a square of 32 ×
//! 32 sums.
//!
//! | product | A: rows × words | B: words × columns | C |
//! |---|---|---|---|
//! | scores `Sᵀ = K·Qᵀ` | 16 keys × 32 channels | 32 channels × 16 queries | `s[key][query]` |
//! | values `Oᵀ = Vᵀ·Pᵀ` | 16 channels × 32 keys | 32 keys × 16 queries | `o[channel][query]` |
//!
//! If numbers are split into parts, a step has a pair of operands per part, largest part first, and [`Products`] says
//! which parts meet. Each list changes one operand at a time, so that few are loaded twice. The largest product comes
//! last if that costs no further load, so that the small ones are added up before it.

/// Sixteen rows of sixteen words: two bfloat16 each, of which the first is the lower half. As floats they have no
/// meaning.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
pub(crate) struct Operand(pub(crate) [f32; 256]);

/// Rows and columns of a square of sums.
pub(crate) const SIDE: usize = 32;

/// A square of 32 × 32 sums, row by row: 2 × 2 registers of AMX.
pub(crate) type Square = [f32; SIDE * SIDE];

/// A square of an array of them.
#[inline(always)]
pub(crate) fn square(floats: &mut [f32], number: usize) -> &mut Square {
    let (squares, _) = floats.as_chunks_mut();
    &mut squares[number]
}

/// Which part of which operand is loaded before the next product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Load {
    A(usize),
    B(usize),
}

/// Calls a macro with the table of products: name, parts of A, parts of B, and for each product the parts that are
/// loaded before it.
macro_rules! with_products {
    ($callback:ident $(, $argument:tt)*) => {
        $callback! { [$($argument)*]
            /// One part each.
            One 1 1 [A0 B0];
            /// B in two parts.
            OneByTwo 1 2 [A0 B1] [B0];
            /// B in three parts.
            OneByThree 1 3 [A0 B2] [B1] [B0];
            /// A in two parts.
            TwoByOne 2 1 [A1 B0] [A0];
            /// A in three parts.
            ThreeByOne 3 1 [A2 B0] [A1] [A0];
            /// Two parts each, without the product of the small ones.
            Three 2 2 [A0 B1] [B0] [A1];
            /// Two parts each.
            Four 2 2 [A0 B1] [A1] [B0] [A0];
            /// Two parts of A and three of B, without the smallest product.
            Five 2 3 [A0 B2] [B1] [A1] [B0] [A0];
            /// Three parts each: every product down to 2⁻¹⁶ of the largest.
            Six 3 3 [A0 B2] [B1] [A1] [B0] [A2] [A0];
        }
    };
}
#[cfg(target_arch = "x86_64")]
pub(crate) use with_products;

macro_rules! define {
    ([] $($(#[$doc:meta])* $name:ident $a:literal $b:literal $([$($load:ident)+])+;)*) => {
        /// Which parts of two split operands are multiplied, and in which order.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) enum Products {
            $($(#[$doc])* $name,)*
        }

        impl Products {
            /// Parts of A and of B.
            pub(crate) const fn parts(self) -> (usize, usize) {
                match self {
                    $(Self::$name => ($a, $b),)*
                }
            }

            /// Per product the parts that are loaded before it.
            pub(crate) const fn steps(self) -> &'static [&'static [Load]] {
                match self {
                    $(Self::$name => &[$(&[$(define!(@load $load)),+]),+],)*
                }
            }
        }
    };
    (@load A0) => { Load::A(0) };
    (@load A1) => { Load::A(1) };
    (@load A2) => { Load::A(2) };
    (@load B0) => { Load::B(0) };
    (@load B1) => { Load::B(1) };
    (@load B2) => { Load::B(2) };
}
with_products!(define);

impl Products {
    /// The parts of A and of B that meet, per product of a step; only as many as [`steps`](Self::steps) count.
    pub(crate) const fn pairs(self) -> [(usize, usize); 6] {
        let (steps, mut pairs, mut now, mut n) = (self.steps(), [(0, 0); 6], (0, 0), 0);
        while n < steps.len() {
            let mut load = 0;
            while load < steps[n].len() {
                match steps[n][load] {
                    Load::A(part) => now.0 = part,
                    Load::B(part) => now.1 = part,
                }
                load += 1;
            }
            pairs[n] = now;
            n += 1;
        }
        pairs
    }

    /// Panics unless the operands hold all parts of all steps. Every unit relies on it.
    #[inline(always)]
    pub(crate) fn check(self, a: &[Operand], b: &[Operand], steps: usize) {
        let (in_a, in_b) = self.parts();
        let holds = |operands: &[Operand], parts: usize| steps.saturating_mul(2 * parts) <= operands.len();
        assert!(holds(a, in_a) && holds(b, in_b), "operands of {steps} steps");
    }
}

/// Multiplies operands, on this thread.
pub(crate) trait AmxUnit {
    /// Makes the unit ready again after the caller's mods, which may have used it for something else.
    fn refresh(&mut self);

    /// `c += Σ a·b` over `steps` (or `c = Σ a·b` if `fresh`): `a[step][part][row / 16]`, `b[step][part][column / 16]`.
    ///
    /// Subnormal numbers count as 0, on either side and in every sum; see [`model`](super::model) for the order of
    /// additions.
    ///
    /// # Panics
    /// Unless `a` and `b` hold that many steps.
    fn block(&mut self, products: Products, a: &[Operand], b: &[Operand], steps: usize, fresh: bool, c: &mut Square);
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use super::*;

    /// Every list multiplies each pair of parts at most once, leaves out none that is larger than one it has, and
    /// changes one operand at a time.
    #[test]
    fn products_are_the_largest_ones() {
        use Products::*;
        for products in [One, OneByTwo, OneByThree, TwoByOne, ThreeByOne, Three, Four, Five, Six] {
            let (parts_a, parts_b) = products.parts();
            let (mut a, mut b, mut pairs) = (usize::MAX, usize::MAX, Vec::new());
            for (n, loads) in products.steps().iter().enumerate() {
                assert_eq!(loads.len(), if n == 0 { 2 } else { 1 }, "{products:?}");
                for load in *loads {
                    match *load {
                        Load::A(part) => a = part,
                        Load::B(part) => b = part,
                    }
                }
                assert!(a < parts_a && b < parts_b, "{products:?}");
                assert!(!pairs.contains(&(a, b)), "{products:?} twice {a}, {b}");
                pairs.push((a, b));
            }
            assert!(products == Three || pairs.last() == Some(&(0, 0)), "{products:?}: {pairs:?}");
            let smallest = pairs.iter().map(|(a, b)| a + b).max().expect("not empty");
            for a in 0..parts_a {
                for b in 0..parts_b {
                    assert!(a + b >= smallest || pairs.contains(&(a, b)), "{products:?} lacks {a}, {b}");
                }
            }
        }
    }
}
