//! Rust source with its comments and literals blanked out, so that rules about code do not trip over prose.
//!
//! A scanner, not a parser: it knows comments (nested ones too), string, raw string, byte string and character
//! literals, and tells lifetimes from characters. Lines and columns stay where they were.

/// `text` with everything that is not code replaced by spaces; line breaks stay.
pub(super) fn code_only(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = literal_or_comment_end(&chars, at);
        if end > at {
            out.extend(chars[at..end].iter().map(|&c| if c == '\n' { '\n' } else { ' ' }));
            at = end;
        } else {
            out.push(chars[at]);
            at += 1;
        }
    }
    out
}

/// Where the comment or literal that starts at `at` ends; `at` itself where none starts.
fn literal_or_comment_end(chars: &[char], at: usize) -> usize {
    let peek = |n: usize| chars.get(at + n).copied().unwrap_or('\0');
    let inside_word = at > 0 && is_word(chars[at - 1]);
    match (chars[at], peek(1)) {
        ('/', '/') => (at..chars.len()).find(|&i| chars[i] == '\n').unwrap_or(chars.len()),
        ('/', '*') => block_comment_end(chars, at),
        ('"', _) => string_end(chars, at + 1),
        ('b' | 'c', '"') if !inside_word => string_end(chars, at + 2),
        ('r', '"' | '#') if !inside_word => raw_string_end(chars, at, at + 1),
        ('b' | 'c', 'r') if !inside_word => raw_string_end(chars, at, at + 2),
        ('\'', '\\') => (at + 3..chars.len()).find(|&i| chars[i] == '\'').map_or(chars.len(), |i| i + 1),
        ('\'', _) if peek(2) == '\'' => at + 3,
        _ => at,
    }
}

fn block_comment_end(chars: &[char], start: usize) -> usize {
    let (mut depth, mut at) = (0, start);
    while at < chars.len() {
        match (chars[at], chars.get(at + 1)) {
            ('/', Some('*')) => (depth, at) = (depth + 1, at + 2),
            ('*', Some('/')) => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            return at;
        }
    }
    at
}

fn string_end(chars: &[char], mut at: usize) -> usize {
    while at < chars.len() {
        match chars[at] {
            '\\' => at += 2,
            '"' => return at + 1,
            _ => at += 1,
        }
    }
    chars.len()
}

/// From `hashes` on: `#…#"…"#…#`. Gives `start` back where that is not what stands there (a raw identifier).
fn raw_string_end(chars: &[char], start: usize, hashes: usize) -> usize {
    let count = chars[hashes..].iter().take_while(|&&c| c == '#').count();
    let open = hashes + count;
    if chars.get(open) != Some(&'"') {
        return start;
    }
    let closes =
        |i: &usize| chars[*i] == '"' && chars[i + 1..].iter().take(count).filter(|&&c| c == '#').count() == count;
    (open + 1..chars.len()).find(closes).map_or(chars.len(), |i| i + 1 + count)
}

/// Whether a character belongs to an identifier.
pub(super) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Byte positions at which `word` stands as a whole word.
pub(super) fn words<'t>(line: &'t str, word: &'t str) -> impl Iterator<Item = usize> + 't {
    line.match_indices(word).map(|(at, _)| at).filter(move |&at| {
        let before = line[..at].chars().next_back();
        let after = line[at + word.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(text: &str) -> String {
        code_only(text).split_whitespace().collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn comments_and_literals_vanish_and_code_stays() {
        assert_eq!(kept("a // unsafe\nb /* x /* y */ z */ c"), "a b c");
        assert_eq!(kept(r#"f("unsafe \" {", 'x', '\'', b'u', b"unsafe") + g"#), "f( , , , b , ) + g");
        assert_eq!(kept("r\"unsafe\" r#\"a \" unsafe\"# br#\"x\"# end"), "end");
        assert_eq!(kept("fn f<'a>(x: &'a str, r#type: u8) {}"), "fn f<'a>(x: &'a str, r#type: u8) {}");
        assert_eq!(kept("for r in bar { var\"x\" }"), "for r in bar { var }");
    }

    #[test]
    fn lines_stay_where_they_were() {
        let text = "a\n/* one\ntwo */ b\n\"x\ny\" c\n";
        let code = code_only(text);
        assert_eq!(code.lines().count(), text.lines().count());
        assert_eq!(code.lines().nth(2), Some("       b"));
        assert_eq!(code.lines().nth(4), Some("   c"));
    }

    #[test]
    fn whole_words_only() {
        assert_eq!(words("unsafe_code unsafe xunsafe unsafe{", "unsafe").collect::<Vec<_>>(), [12, 27]);
    }
}
