//! Closed forms: the textbook's numbers, exact pair counts, and no overflow.

use attn_core::mask::Term;
use attn_core::mask::{BlockSparse, Window};
use attn_core::score::At;
use attn_core::{Align, AttnShape, Dtype, Mask, View};
use attn_layers::cost::{self, LayerKind, Model};

#[test]
fn layers_have_the_textbook_counts() {
    for d in [1usize, 64, 768] {
        for n in [1usize, 128, 2048] {
            let (n6, d6) = (n as u128, d as u128);
            let plain = Model::square(d);
            assert_eq!(plain.parameters(), 3 * d6 * d6);
            assert_eq!(plain.flops(n), 6 * n6 * d6 * d6 + 4 * n6 * n6 * d6);
            let joined = plain.with_output();
            assert_eq!(joined.parameters(), 4 * d6 * d6);
            assert_eq!(joined.flops(n), 8 * n6 * d6 * d6 + 4 * n6 * n6 * d6);
        }
    }
    // Splitting into heads changes neither count; sharing keys and values takes parameters away.
    let (one, eight) = (Model::square(512).with_output(), Model::multi_head(512, 8, 8));
    assert_eq!((eight.parameters(), eight.flops(1000)), (one.parameters(), one.flops(1000)));
    assert_eq!(Model::multi_head(512, 8, 2).parameters(), 2 * 512 * 512 + 2 * 512 * 128);
    assert_eq!(Model::multi_head(512, 8, 2).attention_flops(9), one.attention_flops(9));
}

#[test]
fn the_crossover_is_where_the_terms_meet() {
    assert_eq!(Model::square(100).crossover_len(), 150);
    assert_eq!(Model::square(100).with_output().crossover_len(), 200);
    let model = Model::multi_head(768, 12, 4);
    let n = usize::try_from(model.crossover_len()).unwrap();
    assert!(model.attention_flops(n) >= model.projection_flops(n));
    assert!(model.attention_flops(n - 1) < model.projection_flops(n - 1));
    assert_eq!(Model::multi_head(768, 0, 0).crossover_len(), 0);
}

fn square(n: usize, d: usize) -> AttnShape {
    AttnShape::new([1, 1, n, d], [1, 1, n, d], [1, 1, n, d]).unwrap()
}

#[test]
fn bytes_of_the_weights_and_of_what_moves() {
    assert_eq!(cost::weights_bytes(&square(2048, 64), Dtype::F32), 16 * 1024 * 1024);
    assert_eq!(cost::weights_bytes(&square(100_000, 64), Dtype::F32), 40_000_000_000);
    let shape = square(1024, 64);
    let tensor = 1024 * 64 * 4;
    assert_eq!(cost::naive_bytes(&shape, Dtype::F32), 4 * tensor + 4 * 1024 * 1024 * 4);
    assert_eq!(cost::streaming_bytes(&shape, Dtype::F32, 4096), 4 * tensor);
    assert_eq!(cost::streaming_bytes(&shape, Dtype::F32, 100), 2 * tensor + 11 * 2 * tensor); // ⌈1024 / 100⌉ tiles
    assert_eq!(cost::streaming_bytes(&shape, Dtype::F32, 0), cost::streaming_bytes(&shape, Dtype::F32, 1));
    let decode = AttnShape::new([2, 32, 1, 128], [2, 8, 4096, 128], [2, 8, 4096, 64]).unwrap();
    assert_eq!(cost::kv_bytes(&decode, Dtype::Bf16), 2 * 8 * 4096 * (128 + 64) * 2);
    assert_eq!(cost::rnn_flops(2048, 512), 4 * 2048 * 512 * 512);
}

/// Counts by asking for every position.
fn count(mask: &Mask<'_>, shape: &AttnShape) -> u128 {
    let mut pairs = 0;
    for batch in 0..shape.batch {
        for head in 0..shape.q_heads {
            for query in 0..shape.q_len {
                for key in 0..shape.kv_len {
                    pairs += u128::from(mask.visible(shape, At { batch, head, query, key }));
                }
            }
        }
    }
    pairs
}

#[test]
fn visible_pairs_are_exact() {
    let shape = AttnShape::new([2, 4, 70, 8], [2, 2, 150, 8], [2, 2, 150, 16]).unwrap();
    let dense: Vec<bool> = (0..4 * 70 * 150).map(|n| n * 7919 % 5 < 2).collect();
    let blocks: Vec<bool> = (0..4 * 7 * 10).map(|n| n * 31 % 3 == 0).collect();
    let masks = [
        Mask::none(),
        Mask::causal(Align::TopLeft),
        Mask::causal(Align::BottomRight),
        Mask::term(Term::Window(Window { left: Some(9), right: None, align: Align::BottomRight })),
        Mask::padding(&[50, 0]).and(Mask::kv_starts(&[3, 100])),
        Mask::keep(View::broadcast(&dense, &[4, 70, 150]).unwrap()),
        Mask::drop(View::broadcast(&dense[..150], &[150]).unwrap()).and(Mask::causal(Align::BottomRight)),
        Mask::block_sparse(BlockSparse {
            blocks: View::broadcast(&blocks, &[4, 7, 10]).unwrap(),
            block_q: 10,
            block_k: 15,
        }),
    ];
    for (n, mask) in masks.iter().enumerate() {
        mask.check(&shape).unwrap();
        let pairs = cost::visible_pairs(mask, &shape);
        assert_eq!(pairs, count(mask, &shape), "mask {n}");
        assert_eq!(cost::forward_flops(&shape, pairs), 2 * pairs * (8 + 16));
        assert_eq!(cost::backward_flops(&shape, pairs), 2 * pairs * (3 * 8 + 2 * 16));
    }
    let n = 1000u128;
    let causal = cost::visible_pairs(&Mask::causal(Align::TopLeft), &square(1000, 1));
    assert_eq!(causal, n * (n + 1) / 2);
}

#[test]
fn table_1_of_attention_is_all_you_need() {
    let (n, d) = (4096, 512);
    let (n6, d6) = (n as u128, d as u128);
    let rows = [
        (LayerKind::SelfAttention, n6 * n6 * d6, 1, Some(1)),
        (LayerKind::Recurrent, n6 * d6 * d6, n6, Some(n6)),
        (LayerKind::Convolutional { kernel: 4 }, 4 * n6 * d6 * d6, 1, Some(6)), // 4⁶ = 4096
        (LayerKind::Convolutional { kernel: 3 }, 3 * n6 * d6 * d6, 1, Some(8)), // 3⁷ = 2187
        (LayerKind::Convolutional { kernel: 1 }, n6 * d6 * d6, 1, None),
        (LayerKind::Restricted { neighbourhood: 100 }, 100 * n6 * d6, 1, Some(41)),
        (LayerKind::Restricted { neighbourhood: 0 }, 0, 1, None),
    ];
    for (kind, complexity, steps, path) in rows {
        assert_eq!(kind.complexity(n, d), complexity, "{kind:?}");
        assert_eq!(kind.sequential_steps(n), steps, "{kind:?}");
        assert_eq!(kind.max_path_len(n), path, "{kind:?}");
    }
}

#[test]
fn nothing_overflows() {
    let most = usize::MAX;
    // On 32-bit targets no product of three sizes fills 128 bits: there is nothing to saturate.
    if usize::BITS == 64 {
        assert_eq!(Model::multi_head(most, 1, 1).flops(most), u128::MAX);
        assert_eq!(Model::square(most).parameters(), u128::MAX);
        assert_eq!(cost::rnn_flops(most, most), u128::MAX);
        assert_eq!(LayerKind::SelfAttention.complexity(most, most), u128::MAX);
    }
    assert_eq!(cost::rnn_flops(most, 0), 0);
    assert!(LayerKind::Convolutional { kernel: 2 }.max_path_len(most) == Some(usize::BITS.into()));
    let shape = AttnShape::new([1, 1, 1, most], [1, 1, most, most], [1, 1, most, 1]).unwrap();
    assert_eq!(cost::forward_flops(&shape, u128::MAX), u128::MAX);
    assert!(cost::streaming_bytes(&shape, Dtype::F64, 1) > 0);
    assert_eq!(cost::all_pairs(&AttnShape::new([0, 1, most, 1], [0, 1, most, 1], [0, 1, most, 1]).unwrap()), 0);
}
