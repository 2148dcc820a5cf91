//! The first head's weights as a picture: the page's heat map without the page, for documents.
//!
//! One file for light pages and one for dark ones. The colours are those of the page's script.

use std::fmt::Write;

use attn_bench::report::escape::html;
use attn_bench::report::plot::Theme;

use attn_heatmap::Scene;

/// Page, text, and cells that a query does not see.
const fn colours(theme: Theme) -> [&'static str; 3] {
    match theme {
        Theme::Light => ["#ffffff", "#1c1f23", "#eceff2"],
        Theme::Dark => ["#14171a", "#e8eaed", "#24292e"],
    }
}

/// Side of a cell, and the room for tokens on the left and above.
const CELL: usize = 56;
const LEFT: usize = 64;
const TOP: usize = 52;

/// The picture; `None` of a scene without a head.
pub(super) fn svg(scene: &Scene, theme: Theme) -> Option<String> {
    let rows = &scene.layers.first()?.heads.first()?.views.first()?.before;
    let largest = rows.iter().flatten().flatten().copied().fold(f32::MIN_POSITIVE, f32::max);
    let [page, text, hidden] = colours(theme);
    let side = CELL * scene.tokens.len();
    let (width, height) = (LEFT + side + 8, TOP + side + 8);
    let mut out = format!(
        "<svg width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {width} {height}\" \
         xmlns=\"http://www.w3.org/2000/svg\" font-family=\"system-ui, sans-serif\" font-size=\"14\" fill=\"{text}\">\n\
         <title>{}</title>\n\
         <rect width=\"100%\" height=\"100%\" fill=\"{page}\"/>\n",
        html(&format!("Attention weights: {}", scene.title))
    );
    // Writing into a string cannot fail.
    let _ = writeln!(out, "<text x=\"{}\" y=\"18\" text-anchor=\"middle\" opacity=\".65\">key</text>", LEFT + side / 2);
    for (n, token) in scene.tokens.iter().enumerate() {
        let (middle, token) = (n * CELL + CELL / 2, html(token));
        let _ = writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{token}</text>", LEFT + middle, TOP - 10);
        let _ =
            writeln!(out, "<text x=\"{}\" y=\"{}\" text-anchor=\"end\">{token}</text>", LEFT - 10, TOP + middle + 5);
    }
    for (y, row) in rows.iter().enumerate() {
        for (x, weight) in row.iter().enumerate() {
            let (left, top) = (LEFT + x * CELL + 1, TOP + y * CELL + 1);
            let [ground, ink] = match weight {
                Some(weight) => heat(weight / largest, theme),
                None => [hidden.to_owned(), text.to_owned()],
            };
            let side = CELL - 2;
            let _ = writeln!(
                out,
                "<rect x=\"{left}\" y=\"{top}\" width=\"{side}\" height=\"{side}\" rx=\"4\" fill=\"{ground}\"/>"
            );
            if let Some(weight) = weight {
                let (x, y) = (left + CELL / 2 - 1, top + CELL / 2 + 4);
                let _ =
                    writeln!(out, "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" fill=\"{ink}\">{weight:.2}</text>");
            }
        }
    }
    Some(out + "</svg>\n")
}

/// The colour of a weight from 0 to 1, and of text on it. Lightness in OKLab (Ottosson 2020) is linear in the weight.
fn heat(weight: f32, theme: Theme) -> [String; 2] {
    let x = weight.clamp(0.0, 1.0);
    let (light, end) = match theme {
        Theme::Light => (0.96 - 0.66 * x, 1.0 - x),
        Theme::Dark => (0.27 + 0.68 * x, x),
    };
    let (chroma, hue) = (0.03 + 0.44 * x * (1.0 - x), (275.0 - 170.0 * end).to_radians());
    let (a, b) = (chroma * hue.cos(), chroma * hue.sin());
    let l = (light + 0.396_337_78 * a + 0.215_803_76 * b).powi(3);
    let m = (light - 0.105_561_346 * a - 0.063_854_17 * b).powi(3);
    let s = (light - 0.089_484_18 * a - 1.291_485_5 * b).powi(3);
    let linear = [
        4.076_741_7 * l - 3.307_711_6 * m + 0.230_969_93 * s,
        -1.268_438 * l + 2.609_757_4 * m - 0.341_319_4 * s,
        -0.004_196_086 * l - 0.703_418_6 * m + 1.707_614_7 * s,
    ]
    .map(|x: f32| x.clamp(0.0, 1.0));
    let byte = |x: f32| (255.0 * if x <= 0.003_130_8 { 12.92 * x } else { 1.055 * x.powf(1.0 / 2.4) - 0.055 }).round();
    let [red, green, blue] = linear.map(|x| byte(x) as u8);
    let bright = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
    [format!("#{red:02x}{green:02x}{blue:02x}"), if bright > 0.179 { "#000000" } else { "#ffffff" }.to_owned()]
}

#[cfg(test)]
mod tests {
    use super::super::example;
    use super::super::masks::PageMask;
    use super::*;

    #[test]
    fn every_visible_weight_has_its_number() {
        let scene = example::scene(&attn_layers::worked_example::TOKENS, 1, &[PageMask::Causal], None).unwrap();
        for (theme, _) in Theme::ALL {
            let svg = svg(&scene, theme).unwrap();
            assert_eq!(svg.matches("<rect").count(), 1 + 36);
            // Two per token, one word for the axis, and a number for each key up to the query.
            assert_eq!(svg.matches("<text").count(), 2 * 6 + 1 + 21);
            assert!(svg.contains(">1.00</text>") && svg.contains(colours(theme)[0]), "{svg}");
        }
    }

    #[test]
    fn text_can_be_read_on_every_colour() {
        assert_eq!([heat(0.0, Theme::Light), heat(0.0, Theme::Dark)].map(|c| c[1].clone()), ["#000000", "#ffffff"]);
        assert_eq!([heat(1.0, Theme::Light), heat(1.0, Theme::Dark)].map(|c| c[1].clone()), ["#ffffff", "#000000"]);
    }
}
