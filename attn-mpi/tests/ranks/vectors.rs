//! The conformance suite `ring` over ranks: expectations in `f64` that others computed. Its mutants must fail.
//!
//! The folder `ATTN_VECTORS` names is read, or `../shared/conformance-new` beside the workspace; where it is not there,
//! that is said, and the committed selection is run. A case's shards go to the ranks in turn, so that every case runs
//! on every number of ranks, some of which hold nothing. The outputs over one shard alone are those of the whole call
//! with the keys of the others hidden.

use std::path::{Path, PathBuf};

use attn_core::half::{bf16, f16};
use attn_core::mask::{Term, Window};
use attn_core::{Align, Attention, AttnShape, Layout, Mask, Outputs, View, ViewMut, state};
use attn_mpi::mpi::topology::SimpleCommunicator;
use attn_mpi::{Cluster, Link, Method, Sharding, predict};
use attn_simd::KernelElement;
use bytemuck::Pod;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

use crate::TIMEOUT;

/// What became of a case.
enum Verdict {
    Passed,
    Failed(String),
    Skipped(&'static str),
}

/// The folder of the suites, and whether it is the whole one.
pub(crate) fn folder() -> (PathBuf, bool) {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let whole = std::env::var_os("ATTN_VECTORS").map_or(crates.join("../shared/conformance-new"), PathBuf::from);
    if whole.join("ring.json").is_file() { (whole, true) } else { (crates.join("attn-testing/vectors"), false) }
}

/// Says so if the whole suite is not there: a short run must not look like a whole one.
pub(crate) fn announce() {
    if let (used, false) = folder() {
        println!("vectors: ring.json IS NEITHER IN ATTN_VECTORS NOR BESIDE THE WORKSPACE: 1 SUITE SKIPPED");
        println!("vectors: ONLY THE COMMITTED SELECTION IS RUN: {}", used.display());
    }
}

pub(crate) fn run(cluster: Cluster) {
    let other = Cluster::new(&SimpleCommunicator::world()).timeout(TIMEOUT).threads(1);
    let clusters = [cluster.method(Method::Ring), other.method(Method::Heads)];
    let folder = folder().0;
    let (mut passed, mut skipped, mut mutants) = (0, Vec::new(), 0);
    for suite in ["ring", "mutants"] {
        let text = std::fs::read_to_string(folder.join(format!("{suite}.json"))).expect("the suite's cases");
        let bytes = std::fs::read(folder.join(format!("{suite}.safetensors"))).expect("the suite's tensors");
        let tensors = SafeTensors::deserialize(&bytes).expect("a safetensors file");
        let cases: Vec<Value> = serde_json::from_str(&text).expect("a list of cases");
        for case in
            cases.iter().filter(|case| ["ring_attention", "merge_states"].map(Value::from).contains(&case["op"]))
        {
            let (verdict, name) = (case_on(&clusters, &Case { case, tensors: &tensors }), &case["name"]);
            match (verdict, case["must_fail"] == true) {
                (Verdict::Passed, false) => passed += 1,
                (Verdict::Failed(_), true) => mutants += 1,
                (Verdict::Skipped(why), _) => skipped.push(format!("{name} ({why})")),
                (Verdict::Passed, true) => panic!("{name} passes, and is wrong on purpose"),
                (Verdict::Failed(why), false) => panic!("{name}: {why}"),
            }
        }
    }
    assert!(passed > 4 && mutants == 2, "{passed} cases and {mutants} mutants");
    if clusters[0].rank() == 0 {
        println!("    {passed} cases pass, {} skipped {skipped:?}, {mutants} mutants fail as they must", skipped.len());
    }
}

/// A case, and the tensors of its suite.
#[derive(Clone, Copy)]
struct Case<'c> {
    case: &'c Value,
    tensors: &'c SafeTensors<'c>,
}

impl Case<'_> {
    /// Sizes and numbers of an input or an output.
    fn tensor(&self, of: &str, role: &str) -> (Vec<usize>, Vec<f64>) {
        fn all<const N: usize>(bytes: &[u8], from: impl Fn([u8; N]) -> f64) -> Vec<f64> {
            bytes.as_chunks::<N>().0.iter().map(|x| from(*x)).collect()
        }
        let name = self.case[of][role].as_str().expect("a name of a tensor");
        let view = self.tensors.tensor(name).expect("the file has it");
        let bytes = view.data();
        let numbers = match view.dtype() {
            Dtype::F64 => all(bytes, f64::from_le_bytes),
            Dtype::F32 => all(bytes, |x| f64::from(f32::from_le_bytes(x))),
            Dtype::F16 => all(bytes, |x| f16::from_le_bytes(x).to_f64()),
            Dtype::BF16 => all(bytes, |x| bf16::from_le_bytes(x).to_f64()),
            other => panic!("no suite has {other:?}"),
        };
        (view.shape().to_vec(), numbers)
    }

    /// An input, in the type of the case.
    fn input<T: KernelElement>(&self, role: &str) -> ([usize; 4], Vec<T>) {
        let (sizes, numbers) = self.tensor("inputs", role);
        (sizes.try_into().expect("rank 4"), numbers.into_iter().map(T::from_f64).collect())
    }

    fn integer(&self, name: &str) -> Option<isize> {
        self.case["params"][name].as_i64().map(|x| isize::try_from(x).expect("a small number"))
    }

    /// Who holds what: the shards in turn.
    fn sharding(&self, name: &str, ranks: usize) -> Sharding {
        let mut shards = vec![Vec::new(); ranks];
        for (n, ranges) in self.case["params"][name].as_array().expect("a list of shards").iter().enumerate() {
            shards[n % ranks].extend(ranges.as_array().expect("a list of ranges").iter().map(range));
        }
        shards.iter_mut().for_each(|ranges| ranges.sort_by_key(|range| range.start));
        Sharding::new(shards).expect("each position once")
    }

    /// Compares numbers at these places of an output.
    fn compare(
        &self,
        role: &str,
        places: impl Iterator<Item = usize>,
        got: &[f32],
        shape: &[usize],
    ) -> Result<(), String> {
        let (sizes, want) = self.tensor("outputs", role);
        if sizes != shape {
            return Err(format!("{role} of shape {shape:?}, not {sizes:?}"));
        }
        let tol = self.case["tol_per_output"].get(role).unwrap_or(&self.case["tol"]);
        let [atol, rtol] = ["atol", "rtol"].map(|name| tol[name].as_f64().expect("a number"));
        for (place, &x) in places.zip(got) {
            let (x, want) = (f64::from(x), want[place]);
            // A NaN on either side is no number that is close.
            let close = x == want || (x - want).abs() <= atol + rtol * want.abs();
            if !close || (x.is_infinite() != want.is_infinite()) {
                return Err(format!("{role}[{place}] is {x}, not {want}"));
            }
        }
        Ok(())
    }
}

fn range(range: &Value) -> std::ops::Range<usize> {
    let at = |n: usize| range[n].as_u64().and_then(|x| usize::try_from(x).ok()).expect("a position");
    at(0)..at(1)
}

/// Runs a case on all ranks: what any of them finds is the verdict.
fn case_on(clusters: &[Cluster; 2], case: &Case<'_>) -> Verdict {
    let mine = match (case.case["op"].as_str(), case.case["params"]["dtype"].as_str()) {
        (Some("merge_states"), Some("f64")) | (_, Some("f64")) => return Verdict::Skipped("f64"),
        (Some("merge_states"), _) => merged(&clusters[0], case),
        (_, Some("f32")) => ring::<f32>(clusters, case),
        (_, Some("f16")) => ring::<f16>(clusters, case),
        (_, Some("bf16")) => ring::<bf16>(clusters, case),
        _ => return Verdict::Skipped("an unknown type"),
    };
    let all = clusters[0].all_gather(&[u8::from(mine.is_err())]).expect("one byte on each");
    match (all.iter().position(|&failed| failed != 0), mine) {
        (None, _) => Verdict::Passed,
        (_, Err(why)) => Verdict::Failed(why),
        (Some(rank), Ok(())) => Verdict::Failed(format!("rank {rank} fails")),
    }
}

/// `ring_attention`: by the ring in both ways, and by the heads where there are enough.
fn ring<T: KernelElement + Pod>(clusters: &[Cluster; 2], case: &Case<'_>) -> Result<(), String> {
    let ((q, k, v), ranks) = ((case.input::<T>("q"), case.input::<T>("k"), case.input::<T>("v")), clusters[0].ranks());
    let shape = AttnShape::new(q.0, k.0, v.0).expect("sizes that fit");
    let start = |name| case.integer(name).unwrap_or(0);
    let align = Align::Offset(start("q_start") - start("kv_start"));
    let mut mask = Mask::none();
    if case.case["params"]["causal"] == true {
        mask = mask.and(Mask::causal(align));
    }
    if let Some(left) = case.integer("window_left") {
        let left = Some(usize::try_from(left).expect("a length"));
        mask = mask.and(Mask::term(Term::Window(Window { left, right: None, align })));
    }
    let mut attn = Attention::new().mask(mask);
    if let Some(scale) = case.case["params"]["scale"].as_f64() {
        attn = attn.scale(scale);
    }
    if let Some(cap) = case.case["params"]["softcap"].as_f64() {
        attn = attn.softcap(cap);
    }
    let (queries, keys) = (case.sharding("q_shards", ranks), case.sharding("kv_shards", ranks));
    let call = Call { queries: &queries, keys: &keys, shape, q: &q.1, k: &k.1, v: &v.1 };
    let parts = case.case["params"]["kv_shards"].as_array().expect("a list of shards");
    let mut all = Ok(());
    let heads = predict(&shape, ranks, [4, 4], Link::gigabits(1.0, 1.0)).heads.is_some();
    for cluster in &clusters[..1 + usize::from(heads)] {
        for attn in [attn, attn.reproducible()] {
            // Every rank makes every call, whatever it has found so far.
            all = all.and(call.compare(cluster, &attn, case, ["y", "lse"], None));
            for (n, part) in parts.iter().enumerate() {
                let mut seen = vec![false; shape.kv_len];
                part.as_array().expect("a list of ranges").iter().for_each(|keys| seen[range(keys)].fill(true));
                let seen = View::broadcast(&seen, &[shape.kv_len]).expect("made for it");
                let attn = attn.mask(mask.and(Mask::keep(seen)));
                all = all.and(call.compare(cluster, &attn, case, ["part_y", "part_lse"], Some((n, parts.len()))));
            }
        }
    }
    all
}

/// One call over ranks.
struct Call<'c, T> {
    queries: &'c Sharding,
    keys: &'c Sharding,
    shape: AttnShape,
    q: &'c [T],
    k: &'c [T],
    v: &'c [T],
}

impl<T: KernelElement + Pod> Call<'_, T> {
    /// Runs it, and compares this rank's rows: with those of a part, the `n`-th of so many, or of the whole.
    fn compare(
        &self,
        cluster: &Cluster,
        attn: &Attention<'_>,
        case: &Case<'_>,
        roles: [&str; 2],
        part: Option<(usize, usize)>,
    ) -> Result<(), String> {
        let AttnShape { batch, q_heads, kv_heads, q_len, kv_len, head_dim, value_dim } = self.shape;
        let me = cluster.rank();
        let places = |sharding: &Sharding, pairs: usize, len: usize| -> Vec<usize> {
            let positions: Vec<usize> = sharding.of(me).iter().cloned().flatten().collect();
            (0..pairs).flat_map(|pair| positions.iter().map(move |s| pair * len + s).collect::<Vec<_>>()).collect()
        };
        let rows = places(self.queries, batch * q_heads, q_len);
        let key_rows = places(self.keys, batch * kv_heads, kv_len);
        let cut = |x: &[T], rows: &[usize], dim: usize| -> Vec<T> {
            rows.iter().flat_map(|row| x[row * dim..(row + 1) * dim].iter().copied()).collect()
        };
        let (q, k, v) =
            (cut(self.q, &rows, head_dim), cut(self.k, &key_rows, head_dim), cut(self.v, &key_rows, value_dim));
        let (n, m) = (self.queries.local_len(me), self.keys.local_len(me));
        let view = |x, heads, len, dim| View::new(x, Layout::Bhsd, [batch, heads, len, dim]).expect("cut to it");
        let (mut y, mut lse) = (vec![f32::NAN; rows.len() * value_dim], vec![f32::NAN; rows.len()]);
        let to = ViewMut::new(&mut y, Layout::Bhsd, [batch, q_heads, n, value_dim]).expect("made for it");
        let (k, v) = (view(&k, kv_heads, m, head_dim), view(&v, kv_heads, m, value_dim));
        cluster
            .prefill(
                attn,
                self.queries,
                self.keys,
                view(&q, q_heads, n, head_dim),
                k,
                v,
                Outputs::new(to).lse(&mut lse),
            )
            .expect("a good call");
        let (first, mut sizes) = (part.map_or(0, |(n, _)| n * batch * q_heads * q_len), vec![batch, q_heads, q_len]);
        if let Some((_, parts)) = part {
            sizes.insert(0, parts);
        }
        let rows = || rows.iter().map(|row| first + row);
        let found = case.compare(roles[1], rows(), &lse, &sizes);
        sizes.push(value_dim);
        found.and(case.compare(roles[0], rows().flat_map(|row| row * value_dim..(row + 1) * value_dim), &y, &sizes))
    }
}

/// `merge_states`: each rank has every so many-th part, one all-gather brings the states together.
fn merged(cluster: &Cluster, case: &Case<'_>) -> Result<(), String> {
    let (sizes, y) = case.tensor("inputs", "part_y");
    let (_, lse) = case.tensor("inputs", "part_lse");
    let [count, rows, dim] = [sizes[0], sizes[1..4].iter().product(), sizes[4]];
    let row = state::row_len(dim).expect("a small number");
    let mut mine = vec![0.0f32; rows * row];
    state::clear(&mut mine, dim);
    for n in (cluster.rank()..count).step_by(cluster.ranks()) {
        let mut part = vec![0.0f32; rows * row];
        for (r, to) in part.chunks_exact_mut(row).enumerate() {
            let at = n * rows + r;
            let out: Vec<f32> = y[at * dim..(at + 1) * dim].iter().map(|&x| x as f32).collect();
            state::from_output(&out, lse[at] as f32, to);
        }
        state::merge_states(&mut mine, &part, dim).expect("as many rows");
    }
    let all = cluster.all_gather(bytemuck::cast_slice(&mine)).expect("as many on each");
    let all: Vec<f32> = all.as_chunks::<4>().0.iter().map(|x| f32::from_ne_bytes(*x)).collect();
    let (first, others) = all.split_at(rows * row);
    let mut joined = first.to_vec();
    others.chunks_exact(rows * row).for_each(|other| state::merge_states(&mut joined, other, dim).expect("as many"));
    let (mut out, mut out_lse) = (vec![0.0f32; rows * dim], vec![0.0f32; rows]);
    for (r, from) in joined.chunks_exact(row).enumerate() {
        out_lse[r] = state::finish(from, None, &mut out[r * dim..(r + 1) * dim]);
    }
    let found = case.compare("y", 0..rows * dim, &out, &sizes[1..]);
    found.and(case.compare("lse", 0..rows, &out_lse, &sizes[1..4]))
}
