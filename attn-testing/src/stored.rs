//! Keys and values encoded in the formats of [`attn_core::formats`], beside the numbers that they mean.

use attn_core::formats::{Format, StoredRows, StoredRowsMut, StoredView};
use attn_core::kv_cache::CacheView;
use attn_core::{Layout, View, ViewMut};

use crate::cases::{Inputs, Memory, Tensor4};

/// What has one scale, in formats that have scales beside their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleOf {
    /// The tensor.
    Tensor,
    /// Each head.
    Head,
    /// Each token of a head.
    Token,
}

impl ScaleOf {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Tensor, Self::Head, Self::Token];

    /// Sizes of the scales of `[batch, heads, tokens]` rows.
    fn sizes(self, [batch, heads, tokens, _]: [usize; 4]) -> [usize; 4] {
        match self {
            Self::Tensor => [1; 4],
            Self::Head => [1, heads, 1, 1],
            Self::Token => [batch, heads, tokens, 1],
        }
    }
}

/// The keys or the values of a call, encoded.
#[derive(Clone, Debug)]
struct Encoded {
    format: Format,
    /// Of the bytes.
    sizes: [usize; 4],
    bytes: Vec<u8>,
    /// Sizes and numbers of the scales.
    scales: Option<([usize; 4], Vec<f32>)>,
}

impl Encoded {
    /// By the library, row by row.
    fn new(x: &Tensor4<f32>, format: Format, of: ScaleOf) -> Self {
        let x = Tensor4::<f32>::new(x.sizes, Memory::Bhsd, |at| f64::from(x.at(at)));
        let [batch, heads, tokens, dim] = x.sizes;
        let row_bytes = format.row_bytes(dim).expect("whole blocks");
        let sizes = [batch, heads, tokens, row_bytes];
        let mut bytes = vec![0xa5; batch * heads * tokens * row_bytes];
        let mut scales = format.is_scaled().then(|| {
            let sizes = of.sizes(x.sizes);
            // One for each head, two or three steps below the largest.
            let scale = |n: usize| 6.0 / format.largest().expect("a scale") * (1.0 + n as f32 / 8.0);
            (sizes, (0..sizes.iter().product()).map(scale).collect::<Vec<f32>>())
        });
        let view = ViewMut::new(&mut bytes, Layout::Bhsd, sizes).expect("bytes");
        let rows = match &mut scales {
            None => StoredRowsMut::new(format, view),
            Some((sizes, scales)) if of == ScaleOf::Token => {
                let scales = ViewMut::new(scales, Layout::Bhsd, *sizes).expect("scales");
                StoredRowsMut::with_scales_per_token(format, view, scales)
            }
            Some((sizes, scales)) => {
                let scales = View::new(scales, Layout::Bhsd, *sizes).expect("scales");
                StoredRowsMut::with_scales(format, view, scales)
            }
        };
        rows.and_then(|mut rows| rows.encode(x.view())).expect("written");
        Self { format, sizes, bytes, scales }
    }

    fn rows(&self) -> StoredRows<'_> {
        let view = |(sizes, scales)| View::new(scales, Layout::Bhsd, sizes).expect("scales");
        let scales = self.scales.as_ref().map(|(sizes, scales)| view((*sizes, scales.as_slice())));
        StoredRows::new(self.format, scales).expect("scales")
    }
}

/// Keys and values of a call, encoded.
#[derive(Clone, Debug)]
pub struct Stored([Encoded; 2]);

impl Stored {
    /// Encodes the keys and values of a call.
    pub fn new(inputs: &Inputs<f32>, [k, v]: [Format; 2], of: ScaleOf) -> Self {
        Self([Encoded::new(&inputs.k, k, of), Encoded::new(&inputs.v, v, of)])
    }

    /// The bytes of keys or of values, to be spoilt.
    pub fn bytes_mut(&mut self, which: usize) -> &mut [u8] {
        &mut self.0[which].bytes
    }

    /// Scales of keys or of values, to be spoilt.
    pub fn scales_mut(&mut self, which: usize) -> &mut [f32] {
        self.0[which].scales.as_mut().map_or(&mut [], |(_, scales)| scales)
    }

    /// As plain tensors of bytes.
    pub fn view(&self) -> StoredView<'_> {
        let [k, v] = &self.0;
        let k_bytes = View::new(&k.bytes, Layout::Bhsd, k.sizes).expect("bytes");
        let v_bytes = View::new(&v.bytes, Layout::Bhsd, v.sizes).expect("bytes");
        StoredView::new(CacheView::of_tensors(k_bytes, v_bytes).expect("a cache"), k.rows(), v.rows()).expect("fits")
    }

    /// The same call on the numbers that are meant.
    pub fn decoded(&self, inputs: &Inputs<f32>) -> Inputs<f32> {
        let (view, mut meant) = (self.view(), inputs.clone());
        let [head_dim, value_dim] = view.dims();
        let (mut key, mut value) = (vec![0.0; head_dim], vec![0.0; value_dim]);
        meant.k.each(|[b, h, t, d], x| {
            view.key(b, h, t, &mut key);
            *x = key[d];
        });
        meant.v.each(|[b, h, t, d], x| {
            view.value(b, h, t, &mut value);
            *x = value[d];
        });
        meant
    }
}
