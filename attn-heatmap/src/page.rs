//! One HTML file that needs no other: the scene as JSON, a style sheet and a script.

use crate::scene::Scene;

const SHELL: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

impl Scene {
    /// The page.
    #[must_use]
    pub fn html(&self) -> String {
        // Inside of a script element only `<` can end it; JSON allows it to be written as an escape.
        let data = serde_json::to_string(self).unwrap_or_default().replace('<', "\\u003c");
        // The data goes in last, so that nothing in it is taken for a place to fill.
        SHELL.replace("{style}", STYLE).replace("{script}", SCRIPT).replace("{scene}", &data)
    }
}

#[cfg(test)]
mod tests {
    use attn_core::{Align, Attention, Layout, Mask, View};

    use super::*;
    use crate::{Drop, Layer};

    /// Some tokens with vectors by formula, and as many keys as are named, or the tokens.
    fn scene(tokens: &[&str], keys: Option<&[&str]>) -> Scene {
        let texts = |texts: &[&str]| texts.iter().map(|&text| text.to_owned()).collect::<Vec<_>>();
        let x: Vec<f32> = (0..32).map(|n| (n as f32).sin()).collect();
        let view = |n| View::new(&x[..2 * n], Layout::Bhsd, [1, 1, n, 2]).unwrap();
        let (q, k) = (view(tokens.len()), view(keys.unwrap_or(tokens).len()));
        let (drop, causal) = (Some(Drop { p: 0.5, seed: 1 }), Attention::new().mask(Mask::causal(Align::TopLeft)));
        let layer = Layer::new("Layer 1".into(), [q, k, k], &[causal], drop).unwrap();
        let (title, note) = (tokens.join(" "), String::new());
        let (tokens, keys) = (texts(tokens), keys.map(texts));
        Scene { title, note, tokens, keys, masks: vec!["causal".into()], dropout: drop, layers: vec![layer] }
    }

    #[test]
    fn the_page_stands_alone_and_holds_the_scene() {
        let html = scene(&["the", "</script><b>", "{style}"], None).html();
        assert!(!html.contains("://") && !html.contains("src=") && !html.contains("@import") && !html.contains("url("));
        assert_eq!(html.matches("</script>").count(), 2); // the data's and the script's
        assert_eq!(html.matches("</style>").count(), 1);
        assert!(html.contains("prefers-color-scheme"));
        let data = html.split("type=\"application/json\">").nth(1).unwrap().split("</script>").next().unwrap();
        let data: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(data["tokens"], serde_json::json!(["the", "</script><b>", "{style}"]));
        let view = &data["layers"][0]["heads"][0]["views"][0];
        assert_eq!((&view["before"][0][0], &view["before"][0][1]), (&1.0.into(), &serde_json::Value::Null));
        assert_eq!(view["after"].as_array().unwrap().len(), 3);
    }

    #[test]
    fn keys_may_be_other_tokens() {
        let html = scene(&["two", "queries"], Some(&["three", "other", "keys"])).html();
        assert!(html.contains(r#""keys":["three","other","keys"]"#));
        assert!(!scene(&["one"], None).html().contains(r#""keys":"#));
    }
}
