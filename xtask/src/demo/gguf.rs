//! Files in GGUF: metadata, and tensors of which most are quantised in blocks.
//!
//! The format is ggml's (github.com/ggml-org/ggml, docs/gguf.md), version 3, little-endian: a header, key/value pairs,
//! a table of tensors with their dims innermost first, then the data. Blocks become `f32` exactly as the file means
//! them; kinds that no demo needs are refused by number. Nothing of the file is believed: every length is held against
//! what is left of it.

use std::collections::HashMap;
use std::path::Path;

use attn_core::half::f16;

use super::tensors::{Tensor, Tensors};
use super::{Failure, Result};

/// A value of the metadata, as far as demos look at them.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    /// Integers and bools.
    Whole(i64),
    /// Floats.
    Real(f64),
    /// Text.
    Text(String),
    /// Several.
    List(Vec<Value>),
}

/// A file that has been read.
pub(super) struct Gguf {
    pub(super) metadata: HashMap<String, Value>,
    pub(super) tensors: Tensors,
}

impl Gguf {
    /// Reads a file, calling `progress` with the number of tensors and those done after each.
    pub(super) fn read(path: &Path, progress: impl FnMut(usize, usize)) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|error| Failure::File(path.to_path_buf(), error))?;
        let parsed = parse(&bytes, progress).map_err(|what| Failure::Format(path.to_path_buf(), what))?;
        Ok(Self { metadata: parsed.0, tensors: Tensors::of(path, parsed.1) })
    }

    /// A number of the metadata.
    pub(super) fn number(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key)? {
            Value::Whole(n) => Some(*n as f64),
            Value::Real(x) => Some(*x),
            Value::Text(_) | Value::List(_) => None,
        }
    }

    /// A list of texts.
    pub(super) fn texts(&self, key: &str) -> Option<Vec<&str>> {
        let Value::List(list) = self.metadata.get(key)? else { return None };
        list.iter().map(|value| if let Value::Text(text) = value { Some(text.as_str()) } else { None }).collect()
    }
}

type Parsed = (HashMap<String, Value>, HashMap<String, Tensor>);

fn parse(bytes: &[u8], mut progress: impl FnMut(usize, usize)) -> std::result::Result<Parsed, String> {
    let mut cursor = Cursor { bytes, at: 0 };
    if cursor.take(4)? != b"GGUF" {
        return Err("is not a GGUF file".into());
    }
    let version = cursor.u32()?;
    if version != 3 {
        return Err(format!("is GGUF version {version}; version 3 is read"));
    }
    let (tensors, pairs) = (cursor.len()?, cursor.len()?);
    let mut metadata = HashMap::new();
    for _ in 0..pairs {
        let key = cursor.text()?;
        let kind = cursor.u32()?;
        metadata.insert(key, cursor.value(kind, 0)?);
    }
    let mut infos = Vec::new();
    for _ in 0..tensors {
        let name = cursor.text()?;
        let dims = cursor.u32()?;
        if dims > 4 {
            return Err(format!("{name} has {dims} dims; at most 4 have a meaning"));
        }
        let mut shape = (0..dims).map(|_| cursor.len()).collect::<std::result::Result<Vec<_>, _>>()?;
        shape.reverse();
        infos.push((name, shape, cursor.u32()?, cursor.len()?));
    }
    let align = match metadata.get("general.alignment") {
        Some(Value::Whole(n)) if *n > 0 => *n as usize,
        _ => 32,
    };
    let start = cursor.at.next_multiple_of(align);
    let mut named = HashMap::new();
    for (done, (name, shape, kind, offset)) in infos.into_iter().enumerate() {
        let wrong = |what: String| format!("{name}: {what}");
        let len =
            shape.iter().try_fold(1usize, |len, &n| len.checked_mul(n)).ok_or_else(|| wrong("too large".into()))?;
        let from = start.checked_add(offset).ok_or_else(|| wrong("starts beyond the file".into()))?;
        let data = widen(kind, len, bytes.get(from..).unwrap_or_default()).map_err(wrong)?;
        progress(tensors, done + 1);
        named.insert(name, Tensor { shape, data });
    }
    Ok((metadata, named))
}

/// `len` numbers of a kind, from the front of `bytes`.
fn widen(kind: u32, len: usize, bytes: &[u8]) -> std::result::Result<Vec<f32>, String> {
    match kind {
        0 => blocks(len, 1, bytes, |&[a, b, c, d]: &[u8; 4], to| to[0] = f32::from_le_bytes([a, b, c, d])),
        1 => blocks(len, 1, bytes, |&[a, b]: &[u8; 2], to| to[0] = half(a, b)),
        // Q4_1: scale and offset in f16, then 32 numbers of 4 bits: low halves of 16 bytes, then high ones.
        3 => blocks(len, 32, bytes, |block: &[u8; 20], to| {
            let [a, b, c, d, packed @ ..] = block;
            let (scale, offset) = (half(*a, *b), half(*c, *d));
            for (i, byte) in packed.iter().enumerate() {
                to[i] = f32::from(byte & 15) * scale + offset;
                to[i + 16] = f32::from(byte >> 4) * scale + offset;
            }
        }),
        // Q8_0: a scale in f16, then 32 numbers of 8 bits.
        8 => blocks(len, 32, bytes, |block: &[u8; 34], to| {
            let [a, b, numbers @ ..] = block;
            to.iter_mut().zip(numbers).for_each(|(to, &n)| *to = f32::from(n as i8) * half(*a, *b));
        }),
        other => Err(format!("is of kind {other}; F32, F16, Q4_1 and Q8_0 (0, 1, 3, 8) are read")),
    }
}

fn half(low: u8, high: u8) -> f32 {
    f16::from_le_bytes([low, high]).to_f32()
}

/// Blocks of `BYTES` bytes, each `per` numbers.
fn blocks<const BYTES: usize>(
    len: usize,
    per: usize,
    bytes: &[u8],
    one: impl Fn(&[u8; BYTES], &mut [f32]),
) -> std::result::Result<Vec<f32>, String> {
    if !len.is_multiple_of(per) {
        return Err(format!("{len} numbers are not whole blocks of {per}"));
    }
    let wanted = (len / per).checked_mul(BYTES).ok_or("too large")?;
    let Some(bytes) = bytes.get(..wanted) else {
        return Err(format!("needs {wanted} bytes, the file has {}", bytes.len()));
    };
    let mut numbers = vec![0.0; len];
    for (block, to) in bytes.as_chunks::<BYTES>().0.iter().zip(numbers.chunks_exact_mut(per)) {
        one(block, to);
    }
    Ok(numbers)
}

/// What is left of the file.
struct Cursor<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl<'b> Cursor<'b> {
    fn take(&mut self, n: usize) -> std::result::Result<&'b [u8], String> {
        let end = self.at.checked_add(n).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| format!("ends at byte {}, in the middle of something", self.bytes.len()))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> std::result::Result<[u8; N], String> {
        let taken = self.take(N)?;
        taken.first_chunk().copied().ok_or_else(|| "ends too early".into())
    }

    fn u32(&mut self) -> std::result::Result<u32, String> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn len(&mut self) -> std::result::Result<usize, String> {
        let n = u64::from_le_bytes(self.array()?);
        usize::try_from(n).map_err(|_| format!("{n} is too large for this machine"))
    }

    fn text(&mut self) -> std::result::Result<String, String> {
        let len = self.len()?;
        let bytes = self.take(len)?;
        String::from_utf8(bytes.to_vec()).map_err(|_| "holds text that is not UTF-8".into())
    }

    fn value(&mut self, kind: u32, depth: usize) -> std::result::Result<Value, String> {
        Ok(match kind {
            0 | 7 => Value::Whole(i64::from(u8::from_le_bytes(self.array()?))),
            1 => Value::Whole(i64::from(i8::from_le_bytes(self.array()?))),
            2 => Value::Whole(i64::from(u16::from_le_bytes(self.array()?))),
            3 => Value::Whole(i64::from(i16::from_le_bytes(self.array()?))),
            4 => Value::Whole(i64::from(self.u32()?)),
            5 => Value::Whole(i64::from(i32::from_le_bytes(self.array()?))),
            6 => Value::Real(f64::from(f32::from_le_bytes(self.array()?))),
            8 => Value::Text(self.text()?),
            9 if depth < 4 => {
                let (kind, len) = (self.u32()?, self.len()?);
                // Grown as it is read: a length is only a claim.
                let mut list = Vec::new();
                for _ in 0..len {
                    list.push(self.value(kind, depth + 1)?);
                }
                Value::List(list)
            }
            10 | 11 => Value::Whole(i64::from_le_bytes(self.array()?)),
            12 => Value::Real(f64::from_le_bytes(self.array()?)),
            other => return Err(format!("holds a value of kind {other}, which version 3 does not know")),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(to: &mut Vec<u8>, text: &str) {
        to.extend((text.len() as u64).to_le_bytes());
        to.extend(text.as_bytes());
    }

    /// A file with one tensor of two rows of 32 and some metadata.
    fn file(kind: u32, data: &[u8]) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend([1u64, 3].into_iter().flat_map(u64::to_le_bytes));
        text(&mut bytes, "name");
        bytes.extend(8u32.to_le_bytes());
        text(&mut bytes, "small");
        text(&mut bytes, "base");
        bytes.extend(6u32.to_le_bytes());
        bytes.extend(2.5f32.to_le_bytes());
        text(&mut bytes, "tokens");
        bytes.extend(9u32.to_le_bytes());
        bytes.extend(8u32.to_le_bytes());
        bytes.extend(2u64.to_le_bytes());
        text(&mut bytes, "a");
        text(&mut bytes, "b");
        text(&mut bytes, "x");
        bytes.extend(2u32.to_le_bytes());
        bytes.extend([32u64, 2].into_iter().flat_map(u64::to_le_bytes));
        bytes.extend(kind.to_le_bytes());
        bytes.extend(0u64.to_le_bytes());
        bytes.resize(bytes.len().next_multiple_of(32), 0);
        bytes.extend(data);
        bytes
    }

    /// Two blocks of Q4_1: 0.5·q − 1 with q counting up, and 2·q with q of 15.
    fn q4_1() -> Vec<u8> {
        let mut data = Vec::new();
        data.extend(f16::from_f32(0.5).to_le_bytes());
        data.extend(f16::from_f32(-1.0).to_le_bytes());
        data.extend((0..16u8).map(|i| i | ((15 - i) << 4)));
        data.extend(f16::from_f32(2.0).to_le_bytes());
        data.extend(f16::from_f32(0.0).to_le_bytes());
        data.extend([0xff; 16]);
        data
    }

    #[test]
    fn metadata_and_blocks_are_read() {
        let mut calls = 0;
        let (metadata, tensors) =
            parse(&file(3, &q4_1()), |all, done| calls += usize::from((all, done) == (1, 1))).unwrap();
        assert_eq!(calls, 1);
        assert_eq!(metadata["name"], Value::Text("small".into()));
        assert_eq!(metadata["base"], Value::Real(2.5));
        assert_eq!(metadata["tokens"], Value::List(vec![Value::Text("a".into()), Value::Text("b".into())]));
        let x = &tensors["x"];
        assert_eq!(x.shape, [2, 32]);
        for i in 0..16 {
            assert_eq!(x.data[i], 0.5 * i as f32 - 1.0);
            assert_eq!(x.data[16 + i], 0.5 * (15 - i) as f32 - 1.0);
        }
        assert!(x.data[32..].iter().all(|&x| x == 30.0));
    }

    #[test]
    fn bytes_are_signed_and_scaled() {
        let mut data = Vec::new();
        for scale in [0.25, -1.0] {
            data.extend(f16::from_f32(scale).to_le_bytes());
            data.extend((0..32u8).map(|i| (i as i8 - 16) as u8));
        }
        let (_, tensors) = parse(&file(8, &data), |_, _| {}).unwrap();
        for i in 0..32 {
            assert_eq!(tensors["x"].data[i], 0.25 * (i as f32 - 16.0));
            assert_eq!(tensors["x"].data[32 + i], 16.0 - i as f32);
        }
    }

    #[test]
    fn a_file_that_is_cut_anywhere_is_an_error() {
        let whole = file(3, &q4_1());
        for len in 0..whole.len() {
            assert!(parse(&whole[..len], |_, _| {}).is_err(), "{len} of {} bytes", whole.len());
        }
        assert!(parse(&whole, |_, _| {}).is_ok());
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let told = |bytes: &[u8]| parse(bytes, |_, _| {}).unwrap_err();
        assert!(told(b"PK\x03\x04").contains("not a GGUF"));
        assert!(told(b"GGUF\x02\0\0\0").contains("version 2"));
        assert!(told(&file(12, &q4_1())).contains("x: is of kind 12"));
    }
}
