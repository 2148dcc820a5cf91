//! Compact descriptions of attention calls, and the inputs that they describe.
//!
//! A [`Case`] is a shape, options and a memory layout; [`Inputs`] are its painted tensors. [`around_edges`] is the grid
//! on which engines are compared: lengths one below, at and above the tile sizes that kernels like, odd dims, all
//! layouts, and options drawn from everything there is.

mod options;
mod terms;

use attn_core::{AttnShape, Element, View};

pub use options::{Drop, Options};
pub use terms::{OwnedTerm, kinds};

use crate::paint::{Paint, nonfinite, normal_at};

/// The layout of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Memory {
    /// `[batch, heads, seq, dim]`, dense.
    Bhsd,
    /// `[batch, seq, heads, dim]`, dense.
    Bshd,
    /// `[seq, batch, heads, dim]`, dense.
    Sbhd,
    /// Rows with a gap after each, which holds nonfinite numbers.
    Padded,
    /// The sequence backwards: a negative stride.
    Reversed,
    /// The dim outermost: neighbours in a row are far apart.
    DimFirst,
}

impl Memory {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::Bhsd, Self::Bshd, Self::Sbhd, Self::Padded, Self::Reversed, Self::DimFirst];

    /// Strides, offset and length of the buffer.
    pub fn place(self, [b, h, s, d]: [usize; 4]) -> ([isize; 4], usize, usize) {
        let [bi, hi, si, di] = [b, h, s, d].map(|n| n as isize);
        let dense = b * h * s * d;
        match self {
            Self::Bhsd => ([hi * si * di, si * di, di, 1], 0, dense),
            Self::Bshd => ([si * hi * di, di, hi * di, 1], 0, dense),
            Self::Sbhd => ([hi * di, di, bi * hi * di, 1], 0, dense),
            Self::Padded => {
                let row = di + 3;
                ([hi * si * row, si * row, row, 1], 2, 2 + b * h * s * (d + 3))
            }
            Self::Reversed => ([hi * si * di, si * di, -di, 1], s.saturating_sub(1) * d, dense),
            Self::DimFirst => ([hi * si, si, 1, bi * hi * si], 0, dense),
        }
    }
}

/// A tensor with its memory.
#[derive(Clone, Debug)]
pub struct Tensor4<T> {
    /// The buffer.
    pub data: Vec<T>,
    /// `[batch, heads, seq, dim]`.
    pub sizes: [usize; 4],
    /// In elements.
    pub strides: [isize; 4],
    /// Of the first element.
    pub offset: usize,
}

impl<T: Element> Tensor4<T> {
    /// A tensor whose elements are `f(place)`; gaps in memory hold nonfinite numbers.
    pub fn new(sizes: [usize; 4], memory: Memory, f: impl Fn([usize; 4]) -> f64) -> Self {
        let (strides, offset, len) = memory.place(sizes);
        let mut tensor = Self { data: (0..len).map(nonfinite).collect(), sizes, strides, offset };
        tensor.each(|place, x| *x = T::from_f64(f(place)));
        tensor
    }

    /// A tensor of normal numbers.
    pub fn painted(sizes: [usize; 4], memory: Memory, seed: u64, sigma: f64) -> Self {
        Self::new(sizes, memory, |place| sigma * normal_at(seed, place))
    }

    /// Calls `f` with each element and its place.
    pub fn each(&mut self, mut f: impl FnMut([usize; 4], &mut T)) {
        let [nb, nh, ns, nd] = self.sizes;
        for b in 0..nb {
            for h in 0..nh {
                for s in 0..ns {
                    for d in 0..nd {
                        let at = self.index([b, h, s, d]);
                        f([b, h, s, d], &mut self.data[at]);
                    }
                }
            }
        }
    }

    /// Index of a place in the buffer.
    pub fn index(&self, place: [usize; 4]) -> usize {
        let step: isize = place.iter().zip(self.strides).map(|(&i, stride)| i as isize * stride).sum();
        self.offset.checked_add_signed(step).unwrap_or(usize::MAX)
    }

    /// One element.
    pub fn at(&self, place: [usize; 4]) -> T {
        self.data[self.index(place)]
    }

    /// The view that engines take.
    pub fn view(&self) -> View<'_, T> {
        View::strided(&self.data, self.sizes, self.strides, self.offset).expect("a tensor fits in its own memory")
    }
}

/// A table of a case; prints short, so that a failure can be read.
#[derive(Clone, PartialEq)]
pub struct Table<T>(pub Vec<T>);

impl<T: core::fmt::Debug> core::fmt::Debug for Table<T> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        match self.0.get(..12) {
            Some(first) => write!(f, "{} of {first:?}…", self.0.len()),
            None => write!(f, "{:?}", self.0),
        }
    }
}

impl<T> core::ops::Deref for Table<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.0
    }
}

/// q, k and v.
#[derive(Clone, Debug)]
pub struct Inputs<T> {
    /// The sizes.
    pub shape: AttnShape,
    /// `[batch, q_heads, q_len, head_dim]`.
    pub q: Tensor4<T>,
    /// `[batch, kv_heads, kv_len, head_dim]`.
    pub k: Tensor4<T>,
    /// `[batch, kv_heads, kv_len, value_dim]`.
    pub v: Tensor4<T>,
}

impl<T: Element> Inputs<T> {
    /// Normal numbers in memory of one kind.
    pub fn painted(shape: AttnShape, memory: Memory, seed: u64, sigma: f64) -> Self {
        let [q, k, v] = sizes(&shape);
        Self {
            shape,
            q: Tensor4::painted(q, memory, seed, sigma),
            k: Tensor4::painted(k, memory, seed + 1, sigma),
            v: Tensor4::painted(v, memory, seed + 2, 1.0),
        }
    }

    /// Dense, in the plainest layout.
    pub fn plain(shape: AttnShape, seed: u64) -> Self {
        Self::painted(shape, Memory::Bhsd, seed, 1.0)
    }
}

/// The sizes of q, k and v.
pub fn sizes(shape: &AttnShape) -> [[usize; 4]; 3] {
    let &AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = shape;
    [[batch, q_heads, q_len, head_dim], [batch, kv_heads, kv_len, head_dim], [batch, kv_heads, kv_len, value_dim]]
}

/// A shape from `(batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim)`.
pub const fn shape(
    (batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim): (usize, usize, usize, usize, usize, usize, usize),
) -> AttnShape {
    AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim }
}

/// One attention call.
#[derive(Clone, Debug)]
pub struct Case {
    /// Sizes.
    pub shape: AttnShape,
    /// Options.
    pub options: Options,
    /// Layout of q, k and v.
    pub memory: Memory,
    /// Seed of the tensors.
    pub seed: u64,
    /// Standard deviation of q and k.
    pub sigma: f64,
}

impl Case {
    /// The tensors.
    pub fn inputs<T: Element>(&self) -> Inputs<T> {
        Inputs::painted(self.shape, self.memory, self.seed, self.sigma)
    }

    /// A case drawn from everything there is, of moderate size.
    pub fn random(seed: u64) -> Self {
        let mut paint = Paint::new(seed);
        let kv_heads = paint.pick(&[1, 1, 2, 3]);
        let shape = AttnShape {
            batch: paint.pick(&[1, 1, 2, 3]),
            q_heads: kv_heads * paint.pick(&[1, 1, 2, 3, 4]),
            kv_heads,
            q_len: paint.pick(&EDGES),
            kv_len: paint.pick(&EDGES),
            head_dim: paint.pick(&DIMS),
            value_dim: paint.pick(&DIMS),
        };
        let options = Options::random(&shape, &mut paint);
        let memory = paint.pick(&Memory::ALL);
        Self { shape, options, memory, seed: paint.next() >> 8, sigma: paint.pick(&[0.3, 1.0, 1.0, 3.0]) }
    }
}

/// Lengths around the sizes of lanes and tiles: 8, 16, 32, 48, 64, 96.
pub const EDGES: [usize; 22] = [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 130];
/// Head and value dims, odd ones included.
pub const DIMS: [usize; 10] = [1, 2, 3, 8, 15, 16, 33, 40, 64, 80];

/// The grid: every length of [`EDGES`] as `q_len` and as `kv_len`, every dim of [`DIMS`], with options and layouts by
/// turns.
pub fn around_edges() -> Vec<Case> {
    let mut cases = Vec::new();
    for (n, &edge) in EDGES.iter().enumerate() {
        for side in 0..2 {
            let mut case = Case::random(1000 + 2 * n as u64 + side);
            let other = EDGES[(7 * n + 5 + side as usize) % EDGES.len()];
            let (q_len, kv_len) = if side == 0 { (edge, other) } else { (other, edge) };
            let dims = (DIMS[n % DIMS.len()], DIMS[(n * 3 + side as usize) % DIMS.len()]);
            case.shape = AttnShape { q_len, kv_len, head_dim: dims.0, value_dim: dims.1, ..case.shape };
            case.memory = Memory::ALL[(n + 3 * side as usize) % Memory::ALL.len()];
            // Drawn again for the new sizes; every third case plain, so that a failure of the core is not hidden in
            // options.
            let mut paint = Paint::new(77 + n as u64);
            case.options = if n % 3 == 0 { Options::default() } else { Options::random(&case.shape, &mut paint) };
            cases.push(case);
        }
    }
    cases
}
