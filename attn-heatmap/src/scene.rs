//! The content of the page: tokens, and for each layer, head and mask the scores, weights and outputs.
//!
//! Outputs and log-sum-exps come from the kernels (`attn-parallel`), weights from those by [`attn_core::weights`],
//! scores from [`attn_layers::steps`]. A key that a query does not see has no score and no weight (`None`). That
//! differs from a weight of 0: the softmax may underflow, and dropout may have dropped it.

use attn_core::dropout::Dropout;
use attn_core::weights::{self, RowAt};
use attn_core::{Attention, AttnShape, Layout, Outputs, Result, View, ViewMut};
use attn_layers::steps;
use serde::{Serialize, Serializer};

/// A matrix, row by row.
pub type Rows<T> = Vec<Vec<T>>;

/// Everything on one page.
#[derive(Serialize)]
pub struct Scene {
    /// The page's heading.
    pub title: String,
    /// A note about the origin of the numbers.
    pub note: String,
    /// One per query, and per key if there are no others.
    pub tokens: Vec<String>,
    /// One per key, where keys are other tokens than queries.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<Vec<String>>,
    /// Names of the masks, in the order of [`Head::views`].
    pub masks: Vec<String>,
    /// What was drawn, if anything.
    pub dropout: Option<Drop>,
    /// At least one.
    pub layers: Vec<Layer>,
}

/// Dropout by a seed.
#[derive(Clone, Copy, Serialize)]
pub struct Drop {
    /// Probability of dropping a weight.
    pub p: f32,
    /// Seed of the draw; a text on the page, whose numbers have 53 bits.
    #[serde(serialize_with = "text")]
    pub seed: u64,
}

/// A number as a text.
fn text<S: Serializer>(number: &u64, to: S) -> core::result::Result<S::Ok, S::Error> {
    to.collect_str(number)
}

/// All heads of a layer.
#[derive(Serialize)]
pub struct Layer {
    /// How the page calls it.
    pub name: String,
    /// Query heads.
    pub heads: Vec<Head>,
}

/// One query head, with the key/value head that it reads.
#[derive(Serialize)]
pub struct Head {
    /// `[tokens, head_dim]`.
    pub q: Rows<f32>,
    /// `[tokens, head_dim]`.
    pub k: Rows<f32>,
    /// `[tokens, value_dim]`.
    pub v: Rows<f32>,
    /// One per mask.
    pub views: Vec<HeadView>,
}

/// What one head does under one mask.
#[derive(Serialize)]
pub struct HeadView {
    /// Scaled scores, `[tokens, tokens]`.
    pub scores: Rows<Option<f32>>,
    /// Weights as the softmax gave them.
    pub before: Rows<Option<f32>>,
    /// Weights after dropout, if there is any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after: Option<Rows<Option<f32>>>,
    /// The weighted mean of the values, without dropout: `[tokens, value_dim]`.
    pub out: Rows<f32>,
}

impl Layer {
    /// Attends with all heads of a layer: `q` `[1, q_heads, tokens, head_dim]`, `k` and `v` with their `kv_heads` and
    /// as many keys as the page has. A view for each of `attns`, which have no dropout: `drop` draws it.
    ///
    /// # Errors
    /// As [`attn_parallel::forward`].
    pub fn new(
        name: String,
        [q, k, v]: [View<'_, f32>; 3],
        attns: &[Attention<'_>],
        drop: Option<Drop>,
    ) -> Result<Self> {
        let ([_, q_heads, ..], [_, kv_heads, ..]) = (q.sizes(), k.sizes());
        AttnShape::new(q.sizes(), k.sizes(), v.sizes())?;
        let mut heads: Vec<Head> = (0..q_heads)
            .map(|head| {
                let kv_head = head * kv_heads / q_heads;
                Head { q: rows(q, head), k: rows(k, kv_head), v: rows(v, kv_head), views: Vec::new() }
            })
            .collect();
        for attn in attns {
            for (head, view) in heads.iter_mut().zip(views([q, k, v], attn, drop)?) {
                head.views.push(view);
            }
        }
        Ok(Self { name, heads })
    }
}

/// A view per head.
fn views([q, k, v]: [View<'_, f32>; 3], attn: &Attention<'_>, drop: Option<Drop>) -> Result<Vec<HeadView>> {
    let ([_, heads, q_len, _], [_, _, kv_len, value_dim]) = (q.sizes(), v.sizes());
    let (mut out, mut lse) = (vec![0.0; heads * q_len * value_dim], vec![0.0; heads * q_len]);
    let sizes = [1, heads, q_len, value_dim];
    let outputs = Outputs::new(ViewMut::new(&mut out, Layout::Bhsd, sizes)?).lse(&mut lse);
    attn_parallel::forward(attn, q, k, v, outputs)?;
    let out = View::new(&out, Layout::Bhsd, sizes)?;

    let mut finished = vec![0.0f32; heads * q_len * kv_len];
    let sizes = [1, heads, q_len, kv_len];
    steps::masked_scores(attn, q, k, &mut ViewMut::new(&mut finished, Layout::Bhsd, sizes)?)?;
    let finished = View::new(&finished, Layout::Bhsd, sizes)?;
    let dropout = drop.map(|Drop { p, seed }| attn.dropout(Dropout::Seeded { p, seed }));

    (0..heads)
        .map(|head| {
            let (at, mut weights) = (RowAt { batch: 0, head, query: 0 }, vec![0.0f32; q_len * kv_len]);
            let seen = |query, key| finished.at(0, head, query, key) != f32::NEG_INFINITY;
            let visible = |weights: &[f32]| {
                let cell = |query: usize, key: usize| seen(query, key).then(|| short(weights[query * kv_len + key]));
                (0..q_len).map(|query| (0..kv_len).map(|key| cell(query, key)).collect()).collect()
            };
            weights::head_before_dropout(attn, q, k, at, &lse, &mut weights)?;
            let before = visible(&weights);
            let after = match &dropout {
                Some(attn) => {
                    weights::head(attn, q, k, at, &lse, &mut weights)?;
                    Some(visible(&weights))
                }
                None => None,
            };
            let score = |query, key| seen(query, key).then(|| short(finished.at(0, head, query, key)));
            let scores = (0..q_len).map(|query| (0..kv_len).map(|key| score(query, key)).collect()).collect();
            Ok(HeadView { scores, before, after, out: rows(out, head) })
        })
        .collect()
}

/// The rows of one head.
fn rows(x: View<'_, f32>, head: usize) -> Rows<f32> {
    let [_, _, len, _] = x.sizes();
    (0..len).map(|seq| x.row(0, head, seq).iter().map(short).collect()).collect()
}

/// Six decimals: what the lse in `f32` supports, without the digits that it does not.
fn short(x: f32) -> f32 {
    ((f64::from(x) * 1e6).round() / 1e6) as f32
}

#[cfg(test)]
mod tests {
    use attn_core::{Align, Mask};

    use super::*;

    /// Four query heads on two key/value heads, two tokens.
    fn example() -> Layer {
        let (q, kv) = ([1.0f32, 0.0, 0.0, 2.0, 1.0, 0.0, 0.0, 2.0], [3.0f32, 1.0, 5.0, 2.0]);
        let q = View::new(&q, Layout::Bhsd, [1, 4, 2, 1]).unwrap();
        let kv = View::new(&kv, Layout::Bhsd, [1, 2, 2, 1]).unwrap();
        let drop = Some(Drop { p: 0.5, seed: 7 });
        let causal = Attention::new().mask(Mask::causal(Align::TopLeft));
        Layer::new("one".into(), [q, kv, kv], &[causal, Attention::new()], drop).unwrap()
    }

    #[test]
    fn heads_of_a_group_show_the_keys_that_they_share() {
        let layer = example();
        assert_eq!(layer.heads.len(), 4);
        for (head, [first, second]) in layer.heads.iter().zip([[3.0, 1.0], [3.0, 1.0], [5.0, 2.0], [5.0, 2.0]]) {
            let rows = vec![vec![first], vec![second]];
            assert_eq!((&head.k, &head.v), (&rows, &rows));
        }
        assert_eq!((&layer.heads[0].q[0], &layer.heads[1].q[1]), (&vec![1.0], &vec![2.0]));
    }

    #[test]
    fn a_hidden_key_has_no_weight_and_a_row_sums_to_one() {
        for head in example().heads {
            let [causal, all] = head.views.as_slice() else { panic!("two masks") };
            assert_eq!((causal.before[0][1], causal.scores[0][1]), (None, None));
            assert_eq!(causal.before[0][0], Some(1.0));
            assert!(all.before.iter().flatten().all(Option::is_some));
            for row in causal.before.iter().chain(&all.before) {
                assert!((row.iter().flatten().sum::<f32>() - 1.0).abs() < 3e-5);
            }
            assert_eq!(causal.out[0], head.v[0]); // sees only the first value
        }
    }

    #[test]
    fn dropout_drops_or_doubles() {
        let mut kinds = [0, 0];
        for head in example().heads {
            for view in head.views {
                let after = view.after.unwrap();
                for (before, after) in view.before.iter().flatten().zip(after.iter().flatten()) {
                    match (before, after) {
                        (None, None) => {}
                        (Some(_), Some(0.0)) => kinds[0] += 1,
                        (Some(before), Some(after)) => {
                            assert!((after - 2.0 * before).abs() < 3e-5, "{before} {after}");
                            kinds[1] += 1;
                        }
                        other => panic!("{other:?}"),
                    }
                }
            }
        }
        assert!(kinds.iter().all(|&n| n > 0), "{kinds:?}");
    }
}
