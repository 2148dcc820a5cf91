//! Inputs by integer arithmetic: the same numbers on every machine.

/// A generator of inputs (SplitMix64 on 32 bits; Steele et al. 2014).
pub struct Paint(u32);

impl Paint {
    /// From a seed.
    pub const fn new(seed: u32) -> Self {
        Self(seed)
    }

    /// The next 32 bits.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9);
        let mut x = self.0;
        x = (x ^ x >> 16).wrapping_mul(0x21f0_aaad);
        x = (x ^ x >> 15).wrapping_mul(0x735a_2d97);
        x ^ x >> 15
    }

    /// Between −2 and 2, exactly representable.
    pub fn real(&mut self) -> f32 {
        (self.bits() as i32 >> 8) as f32 / 4_194_304.0
    }

    /// Some reals. Filled in place: a copy on its way out would be stack.
    #[inline(always)]
    pub fn reals<const N: usize>(&mut self) -> [f32; N] {
        let mut all = [0.0; N];
        self.fill(&mut all);
        all
    }

    /// Fills with reals.
    #[inline(never)]
    pub fn fill(&mut self, to: &mut [f32]) {
        to.iter_mut().for_each(|x| *x = self.real());
    }

    /// Some bytes of any value.
    #[inline(always)]
    pub fn bytes<const N: usize>(&mut self) -> [i8; N] {
        let mut all = [0; N];
        all.iter_mut().for_each(|x| *x = self.bits() as i8);
        all
    }
}
