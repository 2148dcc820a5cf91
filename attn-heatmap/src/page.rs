//! One HTML file that needs no other: the scene as JSON, a style sheet and a script.

use super::scene::Scene;

const SHELL: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The page.
pub(super) fn html(scene: &Scene) -> String {
    // Inside of a script element only `<` can end it; JSON allows it to be written as an escape.
    let data = serde_json::to_string(scene).unwrap_or_default().replace('<', "\\u003c");
    let title = attn_bench::report::escape::html(&scene.title);
    // The data goes in last, so that nothing in it is taken for a place to fill.
    SHELL.replace("{title}", &title).replace("{style}", STYLE).replace("{script}", SCRIPT).replace("{scene}", &data)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::heatmap::example;
    use crate::heatmap::scene::{Drop, Look};

    #[test]
    fn the_page_stands_alone_and_holds_the_scene() {
        let drop = Some(Drop { p: 0.5, seed: 1 });
        let scene = example::scene(&["the", "</script><b>", "{style}"], 1, &[Look::Causal], drop).unwrap();
        let html = html(&scene);
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
}
