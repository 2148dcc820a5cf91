//! The laws that every engine obeys, on the two engines of this crate. Their bodies are in `attn_testing::laws`.

mod reference {
    use attn_testing::Reference;
    attn_testing::law_tests!([Reference]);
}

mod streaming {
    use attn_testing::Streaming;
    attn_testing::law_tests!([Streaming]);
}
