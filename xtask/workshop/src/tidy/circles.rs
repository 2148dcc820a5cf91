//! Which file of a crate imports which, and the circles among them.
//!
//! Read from the text: `use` declarations and paths that begin with `crate`, `super`, `self` or a child module. A name
//! that a module only imports is followed to the file that defines it. Not counted: what a module re-exports from its
//! own children (so that its docs can name it), tests inside of files, and what macros of other crates make.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use super::code::code_only;

/// The imports of a crate.
pub(super) struct Graph {
    /// Paths of its files, sorted.
    files: Vec<String>,
    /// For each file those that it imports from, and a name that it takes.
    imports: Vec<BTreeMap<usize, String>>,
}

/// A path in a module's text: `use` or not.
#[derive(Clone, Debug)]
struct Mention {
    path: Vec<String>,
    /// The name that a `use` gives it here; nothing elsewhere.
    name: Option<String>,
    /// Whether a `use` makes it public to anyone.
    public: bool,
}

/// A module, as its file says.
#[derive(Default)]
struct Module {
    file: usize,
    mentions: Vec<Mention>,
}

type Modules = BTreeMap<Vec<String>, Module>;

impl Graph {
    /// Of a crate's files below `src`, by path and text.
    pub(super) fn of<'t>(files: impl IntoIterator<Item = (&'t str, &'t str)>) -> Self {
        let files: BTreeMap<&str, &str> = files.into_iter().collect();
        let mut modules = Modules::new();
        for (file, (path, text)) in files.iter().enumerate() {
            let mentions = mentions(&without_tests(&code_only(text)));
            modules.insert(module_of(path), Module { file, mentions });
        }
        let mut imports = vec![BTreeMap::new(); files.len()];
        for (here, module) in &modules {
            for mention in &module.mentions {
                let Some(target) = resolve(&modules, here, &mention.path, 0) else { continue };
                let to = modules[&target].file;
                let re_export = mention.public && target.len() > here.len() && target.starts_with(here);
                if to != module.file && !re_export {
                    let name = mention.path.last().cloned().unwrap_or_default();
                    imports[module.file].entry(to).or_insert(name);
                }
            }
        }
        Self { files: files.keys().map(|path| (*path).to_owned()).collect(), imports }
    }

    /// Sets of files that import one another, each as a way round: `a.rs takes X from b.rs`.
    pub(super) fn circles(&self) -> Vec<(String, String)> {
        let reach = self.reach();
        let (mut circles, mut seen) = (Vec::new(), BTreeSet::<usize>::new());
        for first in 0..self.files.len() {
            if !reach[first].contains(&first) || seen.contains(&first) {
                continue;
            }
            let around: Vec<usize> =
                reach[first].iter().copied().filter(|&other| reach[other].contains(&first)).collect();
            seen.extend(&around);
            let steps: Vec<String> = self
                .way_round(first)
                .iter()
                .map(|&(from, to)| {
                    format!("{} takes {} from {}", self.files[from], self.imports[from][&to], self.files[to])
                })
                .collect();
            circles
                .push((self.files[first].clone(), format!("a circle of {} files: {}", around.len(), steps.join(", "))));
        }
        circles
    }

    /// One line per file, those first that import nothing: its floor, and what it imports.
    pub(super) fn floors(&self) -> Vec<String> {
        let mut floors = vec![0usize; self.files.len()];
        // As often as there are files is enough, circles or not.
        for _ in 0..self.files.len() {
            for (file, imports) in self.imports.iter().enumerate() {
                let above = imports.keys().map(|&to| floors[to] + 1).max().unwrap_or(0);
                floors[file] = above.min(self.files.len());
            }
        }
        let short = |file: usize| self.files[file].split_once("/src/").map_or(&*self.files[file], |(_, rest)| rest);
        let mut order: Vec<usize> = (0..self.files.len()).collect();
        order.sort_by_key(|&file| (floors[file], &self.files[file]));
        order
            .into_iter()
            .map(|file| {
                let from: Vec<&str> = self.imports[file].keys().map(|&to| short(to)).collect();
                format!("{:2}  {} ← {}", floors[file], short(file), from.join(", ")).trim_end_matches(" ← ").to_owned()
            })
            .collect()
    }

    /// The files that each reaches by one import or more.
    fn reach(&self) -> Vec<BTreeSet<usize>> {
        (0..self.files.len())
            .map(|start| {
                let (mut found, mut open) = (BTreeSet::new(), vec![start]);
                while let Some(file) = open.pop() {
                    open.extend(self.imports[file].keys().filter(|&&to| found.insert(to)));
                }
                found
            })
            .collect()
    }

    /// A shortest way from a file back to itself.
    fn way_round(&self, first: usize) -> Vec<(usize, usize)> {
        let (mut before, mut open, mut next) = (BTreeMap::new(), vec![first], 0);
        while next < open.len() && !before.contains_key(&first) {
            let file = open[next];
            next += 1;
            for &to in self.imports[file].keys() {
                if let Entry::Vacant(slot) = before.entry(to) {
                    slot.insert(file);
                    open.push(to);
                }
            }
        }
        let (mut steps, mut at) = (Vec::new(), first);
        while let Some(&from) = before.get(&at) {
            steps.push((from, at));
            at = from;
            if at == first {
                break;
            }
        }
        steps.reverse();
        steps
    }
}

/// The module that a file holds: `a/src/b/c.rs` is `b::c`.
fn module_of(path: &str) -> Vec<String> {
    let below = path.rsplit_once("src/").map_or(path, |(_, rest)| rest).trim_end_matches(".rs");
    let mut parts: Vec<String> = below.split('/').map(str::to_owned).collect();
    if parts.last().is_some_and(|last| matches!(&**last, "lib" | "main" | "mod")) {
        parts.pop();
    }
    parts
}

/// The module whose file defines what a path names in a module: nothing if that is another crate's.
fn resolve(modules: &Modules, here: &[String], path: &[String], depth: usize) -> Option<Vec<String>> {
    if depth > 16 {
        return None; // imports that name one another
    }
    let (mut at, mut rest) = match &*path[0] {
        "crate" => (Vec::new(), &path[1..]),
        "self" => (here.to_vec(), &path[1..]),
        "super" => {
            let ups = path.iter().take_while(|part| *part == "super").count();
            (here[..here.len().checked_sub(ups)?].to_vec(), &path[ups..])
        }
        first => {
            let child = [here, &[first.to_owned()]].concat();
            modules.get(&child)?;
            (child, &path[1..])
        }
    };
    while let Some((part, more)) = rest.split_first() {
        let child = [&at[..], std::slice::from_ref(part)].concat();
        if modules.contains_key(&child) {
            (at, rest) = (child, more);
            continue;
        }
        let import = modules.get(&at)?.mentions.iter().find(|m| m.name.as_ref() == Some(part));
        return match import.filter(|import| import.path != *path) {
            Some(import) => {
                let on = resolve(modules, &at, &import.path, depth + 1)?;
                // What is imported may be a module, of which more is named here.
                let whole = [&["crate".to_owned()][..], &on, more].concat();
                if on.last() == Some(part) && !more.is_empty() {
                    resolve(modules, &[], &whole, depth + 1)
                } else {
                    Some(on)
                }
            }
            None => Some(at),
        };
    }
    modules.contains_key(&at).then_some(at)
}

/// Code without modules that are compiled for tests only.
fn without_tests(code: &str) -> String {
    let mut code = code.to_owned();
    while let Some(start) = ["#[cfg(test)]", "#[cfg(all(test,"].iter().filter_map(|mark| code.find(mark)).min() {
        let open = code[start..].find(['{', ';']).map_or(code.len(), |at| start + at);
        let (mut depth, mut end) = (0usize, code.len());
        for (at, c) in code[open.min(code.len())..].char_indices() {
            match c {
                '{' => depth += 1,
                '}' => depth = depth.saturating_sub(1),
                _ => {}
            }
            if depth == 0 {
                end = open + at + c.len_utf8();
                break;
            }
        }
        code.replace_range(start..end, "");
    }
    code
}

/// All paths of a file: what `use` declares, and other paths of two parts or more.
fn mentions(code: &str) -> Vec<Mention> {
    let tokens = tokens(code);
    let (mut found, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if tokens[at] == "use" {
            // `pub use`, `pub(crate) use`, `pub(in a::b) use`.
            let public = at > 0 && (tokens[at - 1] == "pub" || tokens[at - 1] == ")");
            at = tree(&tokens, at + 1, &mut Vec::new(), public, &mut found);
        } else if is_word(&tokens[at]) && tokens.get(at + 1).is_some_and(|next| next == "::") {
            let mut path = vec![tokens[at].clone()];
            at += 1;
            while tokens.get(at).is_some_and(|token| token == "::") && tokens.get(at + 1).is_some_and(|t| is_word(t)) {
                path.push(tokens[at + 1].clone());
                at += 2;
            }
            if path.len() > 1 {
                found.push(Mention { path, name: None, public: false });
            }
            at += usize::from(tokens.get(at).is_some_and(|token| token == "::"));
        } else {
            at += 1;
        }
    }
    found
}

/// The tree of a `use` from a token on, below a prefix; returns where it ends.
fn tree(tokens: &[String], mut at: usize, prefix: &mut Vec<String>, public: bool, found: &mut Vec<Mention>) -> usize {
    let depth = prefix.len();
    while let Some(token) = tokens.get(at) {
        match &**token {
            "{" => {
                at += 1;
                while tokens.get(at).is_some_and(|token| token != "}") {
                    at = tree(tokens, at, prefix, public, found);
                    at += usize::from(tokens.get(at).is_some_and(|token| token == ","));
                }
                at += 1;
                break;
            }
            "::" => at += 1,
            "as" => {
                let path = if prefix.last().is_some_and(|last| last == "self") && prefix.len() > 1 {
                    prefix[..prefix.len() - 1].to_vec()
                } else {
                    prefix.clone()
                };
                found.push(Mention { path, name: tokens.get(at + 1).cloned(), public });
                at += 2;
                break;
            }
            _ if is_word(token) => {
                prefix.push(token.clone());
                at += 1;
                let ends = tokens.get(at).is_none_or(|next| matches!(&**next, "," | "}" | ";"));
                if ends {
                    let mut path = prefix.clone();
                    if token == "self" && path.len() > 1 {
                        path.pop();
                    }
                    found.push(Mention { name: path.last().cloned(), path, public });
                    break;
                }
            }
            _ => {
                // A glob takes from the module as a whole.
                if token == "*" && !prefix.is_empty() {
                    found.push(Mention { path: prefix.clone(), name: None, public });
                }
                at += 1;
                break;
            }
        }
    }
    prefix.truncate(depth);
    at
}

fn is_word(token: &str) -> bool {
    token.starts_with(|c: char| c.is_alphabetic() || c == '_')
}

/// Words, `::`, and other characters one by one. A lifetime is no word, and `$crate` is `crate`.
fn tokens(code: &str) -> Vec<String> {
    let chars: Vec<char> = code.chars().collect();
    let (mut tokens, mut at) = (Vec::new(), 0);
    while at < chars.len() {
        let start = at;
        if chars[at].is_alphanumeric() || chars[at] == '_' {
            while at < chars.len() && (chars[at].is_alphanumeric() || chars[at] == '_') {
                at += 1;
            }
            if start == 0 || chars[start - 1] != '\'' {
                tokens.push(chars[start..at].iter().collect());
            }
        } else {
            at += if chars[at] == ':' && chars.get(at + 1) == Some(&':') { 2 } else { 1 };
            if !matches!(chars[start], ' ' | '\n' | '\t' | '$') {
                tokens.push(chars[start..at].iter().collect());
            }
        }
    }
    tokens
}

#[cfg(test)]
mod tests {
    use super::*;

    fn graph(files: &[(&str, &str)]) -> Graph {
        Graph::of(files.iter().copied())
    }

    fn circles(files: &[(&str, &str)]) -> Vec<String> {
        graph(files).circles().into_iter().map(|(_, message)| message).collect()
    }

    #[test]
    fn two_files_that_import_one_another_are_a_circle() {
        let found = circles(&[
            ("c/src/lib.rs", "mod a; mod b;"),
            ("c/src/a.rs", "use crate::b::B; pub struct A;"),
            ("c/src/b.rs", "fn f() -> super::a::A { todo() } pub struct B;"),
        ]);
        let says = "a circle of 2 files: c/src/a.rs takes B from c/src/b.rs, c/src/b.rs takes A from c/src/a.rs";
        assert_eq!(found, [says]);
    }

    #[test]
    fn names_are_followed_through_re_exports_to_where_they_are_defined() {
        let files = [
            ("c/src/lib.rs", "mod a; pub use a::{One, two::{self, Two as Second}};"),
            ("c/src/a.rs", "pub mod one; pub mod two; pub use one::One;"),
            ("c/src/a/one.rs", "pub struct One;"),
            ("c/src/a/two.rs", "use super::One; use crate::One as Same; pub struct Two;"),
            ("c/src/d.rs", "use crate::{Second, two::Two};"),
        ];
        assert_eq!(circles(&files), [""; 0]);
        let floors = graph(&files).floors();
        assert_eq!(
            floors,
            ["0  a.rs", " 0  a/one.rs", " 0  lib.rs", " 1  a/two.rs ← a/one.rs", " 2  d.rs ← a/two.rs"]
                .map(|line| if line.starts_with("0") { format!(" {line}") } else { line.to_owned() })
        );
    }

    #[test]
    fn a_parent_that_uses_its_child_which_uses_the_parent_is_one() {
        let parent = "mod child; use child::f; pub struct P; fn g() { f() }";
        let found = circles(&[("c/src/p.rs", parent), ("c/src/p/child.rs", "use super::P; pub fn f() {}")]);
        assert_eq!(found.len(), 1, "{found:?}");
        // Without a `use`, by its path.
        let parent = "mod child; pub struct P; fn g() { child::f() }";
        assert_eq!(circles(&[("c/src/p.rs", parent), ("c/src/p/child.rs", "use super::P;")]).len(), 1);
        // A re-export alone is none.
        let parent = "mod child; pub use child::f; pub struct P;";
        assert_eq!(circles(&[("c/src/p.rs", parent), ("c/src/p/child.rs", "use super::P;")]).len(), 0);
    }

    #[test]
    fn tests_comments_and_other_crates_do_not_count() {
        let found = circles(&[
            ("c/src/a.rs", "use crate::b::B; #[cfg(test)] mod tests { use crate::b::B; fn f() { {} } } struct A;"),
            ("c/src/b.rs", "//! [`crate::a::A`]\nuse other::a::A; #[cfg(test)]\nmod tests { use crate::a::A; }"),
        ]);
        assert_eq!(found, [""; 0]);
    }
}
