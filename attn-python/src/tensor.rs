//! Objects of Python as tensors, and results of the caller's kind: NumPy in, NumPy out; torch in, torch out.
//! `fold` makes views of tensors.

use pyo3::exceptions::{PyImportError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::kind::Kind;
use crate::raw::{AXES, Exchange, Tensor};

/// The library that an array belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Library {
    NumPy,
    Torch,
    /// Something else with DLPack or the buffer protocol, which is read; results are NumPy's.
    Other,
}

/// The functions of a library that every call needs.
struct Known {
    array: Py<PyType>,
    /// `numpy.empty`, `torch.empty`.
    empty: Py<PyAny>,
    /// `torch.to_dlpack`: eight times as fast as `Tensor.__dlpack__`.
    pack: Option<Py<PyAny>>,
    /// Reads a tensor without a capsule: eight times as fast again.
    exchange: Option<Exchange>,
    /// `torch.empty_like`.
    empty_like: Option<Py<PyAny>>,
    /// `torch.is_grad_enabled`.
    is_grad_enabled: Option<Py<PyAny>>,
    /// `torch.autograd.graph.increment_version`.
    count_write: Option<Py<PyAny>>,
    /// The data types float32, float16 and bfloat16.
    types: [Option<Py<PyAny>>; 3],
}

static NUMPY: PyOnceLock<Known> = PyOnceLock::new();
static TORCH: PyOnceLock<Known> = PyOnceLock::new();

/// A library that has been imported, by us or by the caller: we import none that the caller does not use.
fn loaded<'a>(py: Python<'_>, lock: &'a PyOnceLock<Known>, name: &str, array: &str) -> Option<&'a Known> {
    if let Some(known) = lock.get(py) {
        return Some(known);
    }
    let modules = py.import("sys").ok()?.getattr("modules").ok()?;
    let module = modules.cast::<PyDict>().ok()?.get_item(name).ok()??;
    let class = module.getattr(array).ok()?;
    let known = Known {
        exchange: Exchange::of(&class),
        empty_like: module.getattr("empty_like").ok().map(Bound::unbind),
        count_write: (|| module.getattr("autograd")?.getattr("graph")?.getattr("increment_version"))()
            .ok()
            .map(Bound::unbind),
        array: class.cast_into::<PyType>().ok()?.unbind(),
        empty: module.getattr("empty").ok()?.unbind(),
        is_grad_enabled: module.getattr("is_grad_enabled").ok().map(Bound::unbind),
        pack: module.getattr("to_dlpack").ok().map(Bound::unbind),
        types: ["float32", "float16", "bfloat16"].map(|name| module.getattr(name).ok().map(Bound::unbind)),
    };
    let _ = lock.set(py, known);
    lock.get(py)
}

fn numpy(py: Python<'_>) -> Option<&'static Known> {
    loaded(py, &NUMPY, "numpy", "ndarray")
}

fn torch(py: Python<'_>) -> Option<&'static Known> {
    loaded(py, &TORCH, "torch", "Tensor")
}

/// Whose array an object is.
pub(crate) fn library(object: &Bound<'_, PyAny>) -> Library {
    let py = object.py();
    let is = |known: Option<&Known>| {
        known.is_some_and(|known| {
            let array = known.array.bind(py);
            object.get_type().is(array) || object.is_instance(array).unwrap_or(false)
        })
    };
    if is(numpy(py)) {
        Library::NumPy
    } else if is(torch(py)) {
        Library::Torch
    } else {
        Library::Other
    }
}

/// Reads an array where it lies.
pub(crate) fn read<'py>(name: &'static str, object: &Bound<'py, PyAny>) -> PyResult<Tensor<'py>> {
    let py = object.py();
    match library(object) {
        Library::Torch => {
            refuse_gradient(name, object)?;
            if object.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
                return Err(PyValueError::new_err(format!("{name} has torch's negative bit; resolve_neg() clears it")));
            }
            let known = torch(py);
            // Classes that are derived from tensors may be no tensors inside.
            if let Some(Known { array, exchange: Some(exchange), .. }) = known
                && object.get_type().is(array.bind(py))
                && let Ok(tensor) = exchange.read(name, object)
            {
                return Ok(tensor);
            }
            match known.and_then(|torch| torch.pack.as_ref()) {
                Some(pack) => {
                    let capsule = pack.bind(py).call1((object,)).map_err(|error| cause(name, error, object))?;
                    Tensor::of_capsule(name, capsule, false)
                }
                None => Tensor::of_capsule(name, exported(name, object)?, false),
            }
        }
        Library::NumPy => {
            if !object.get_type().is(numpy(py).map_or(py.None().bind(py), |known| known.array.bind(py).as_any())) {
                refuse_masked(name, object)?;
            }
            match object.call_method0(intern!(py, "__dlpack__")) {
                Ok(capsule) => Tensor::of_capsule(name, capsule, false),
                Err(_) if is_bf16(object)? => {
                    let bits = object.call_method1(intern!(py, "view"), (intern!(py, "int16"),))?;
                    Tensor::of_capsule(name, exported(name, &bits)?, true)
                }
                Err(_) => Tensor::of_capsule(name, exported(name, object)?, false),
            }
        }
        Library::Other if object.hasattr(intern!(py, "__dlpack__"))? => {
            Tensor::of_capsule(name, exported(name, object)?, false)
        }
        Library::Other => {
            let buffer = pyo3::types::PyMemoryView::from(object).map_err(|_| {
                let found = type_name(object);
                PyTypeError::new_err(format!("{name} is {found}; an array with DLPack or a buffer is wanted"))
            })?;
            let array = import_numpy(py)?.call_method1("asarray", (buffer,))?;
            Tensor::of_capsule(name, exported(name, &array)?, false)
        }
    }
}

/// As `__dlpack__`, first with a version that can say read-only, then without for producers that know none.
fn exported<'py>(name: &str, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let options = PyDict::new(py);
    options.set_item("max_version", (1, 0))?;
    let method = intern!(py, "__dlpack__");
    let capsule = match object.call_method(method, (), Some(&options)) {
        Err(error) if error.is_instance_of::<PyTypeError>(py) => object.call_method0(method),
        other => other,
    };
    capsule.map_err(|error| {
        let wrapped = PyValueError::new_err(format!("{name}: {}", error.value(py)));
        wrapped.set_cause(py, Some(error));
        wrapped
    })
}

fn cause(name: &str, error: PyErr, object: &Bound<'_, PyAny>) -> PyErr {
    let py = object.py();
    if let Ok(device) = object.getattr("device").and_then(|device| device.getattr("type")?.extract::<String>())
        && device != "cpu"
    {
        return PyValueError::new_err(format!("{name} is on the device {device}; the CPU is wanted"));
    }
    let layout = object.getattr("layout").map_or_else(|_| "a tensor".into(), |layout| layout.to_string());
    let wrapped = PyValueError::new_err(format!("{name} ({layout}): {}", error.value(py)));
    wrapped.set_cause(py, Some(error));
    wrapped
}

/// Refuses a tensor of torch that records gradients, which our results would lose. Under `no_grad` none does.
pub(crate) fn refuse_gradient(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = object.py();
    if !object.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
        return Ok(());
    }
    let recorded = match torch(py).and_then(|torch| torch.is_grad_enabled.as_ref()) {
        Some(is_grad_enabled) => is_grad_enabled.bind(py).call0()?.is_truthy()?,
        None => true,
    };
    if recorded {
        let text = format!("{name} requires grad, which this function does not record; attn.torch.sdpa does");
        return Err(PyValueError::new_err(text));
    }
    Ok(())
}

/// Tells torch that a tensor of the caller was written: what autograd had saved of it is stale.
pub(crate) fn count_write(object: &Bound<'_, PyAny>) -> PyResult<()> {
    if library(object) != Library::Torch || object.call_method0(intern!(object.py(), "is_inference"))?.is_truthy()? {
        return Ok(()); // tensors of inference mode do not count
    }
    match torch(object.py()).and_then(|torch| torch.count_write.as_ref()) {
        Some(count_write) => count_write.bind(object.py()).call1((object,)).map(|_| ()),
        None => Ok(()),
    }
}

fn refuse_masked(name: &str, object: &Bound<'_, PyAny>) -> PyResult<()> {
    if object.hasattr("mask")? {
        return Err(PyTypeError::new_err(format!("{name} is {}, whose mask would be lost", type_name(object))));
    }
    Ok(())
}

/// Whether an array of NumPy holds the bfloat16 of ml_dtypes, for which NumPy has no DLPack.
fn is_bf16(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    object.getattr("dtype")?.getattr("name")?.eq("bfloat16")
}

pub(crate) fn type_name(object: &Bound<'_, PyAny>) -> String {
    object.get_type().fully_qualified_name().map_or_else(|_| "an object".into(), |name| name.to_string())
}

fn import_numpy(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("numpy").map_err(|error| {
        let missing = PyImportError::new_err("buffers, and arrays of other libraries than torch, need NumPy");
        missing.set_cause(py, Some(error));
        missing
    })
}

/// Makes an array of the kind of `like`, uninitialised: of its number type, or float32.
pub(crate) fn empty<'py>(
    like: &Bound<'py, PyAny>,
    kind: Kind,
    single: bool,
    sizes: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    let known = match library(like) {
        Library::Torch => torch(py),
        Library::NumPy => numpy(py),
        Library::Other => {
            import_numpy(py)?;
            numpy(py)
        }
    };
    let known = known.ok_or_else(|| PyImportError::new_err("the library of the array is not loaded"))?;
    let place = match if single { Kind::F32 } else { kind } {
        Kind::F16 => 1,
        Kind::Bf16 => 2,
        _ => 0,
    };
    let dtype = match &known.types[place] {
        Some(dtype) => dtype.bind(py).clone(),
        // bfloat16 of NumPy, which the caller's array has from ml_dtypes.
        None => like.getattr(intern!(py, "dtype"))?,
    };
    let sizes = PyTuple::new(py, sizes)?;
    if library(like) == Library::Torch {
        let options = PyDict::new(py);
        options.set_item(intern!(py, "dtype"), dtype)?;
        known.empty.bind(py).call((sizes,), Some(&options))
    } else {
        known.empty.bind(py).call1((sizes, dtype))
    }
}

/// As [`empty`] of an array that was read, of its number type. If it has the sizes already, torch makes such a tensor
/// in half of the time.
pub(crate) fn empty_as<'py>(
    like: &Bound<'py, PyAny>,
    read: &Tensor<'_>,
    sizes: &[usize],
) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    match torch(py) {
        Some(Known { array, empty_like: Some(empty_like), .. })
            if shape(read) == sizes && read.is_contiguous() && like.get_type().is(array.bind(py)) =>
        {
            empty_like.bind(py).call1((like,))
        }
        _ => empty(like, read.kind, false, sizes),
    }
}

/// Hands a result of NumPy to the library of `like`, if that is another one with a namespace of the array standard.
pub(crate) fn handed<'py>(like: &Bound<'py, PyAny>, result: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = like.py();
    if library(like) != Library::Other || !like.hasattr(intern!(py, "__array_namespace__"))? {
        return Ok(result);
    }
    let namespace = like.call_method0(intern!(py, "__array_namespace__"))?;
    // NumPy has no DLPack for bfloat16; `asarray` reads that.
    namespace
        .call_method1(intern!(py, "from_dlpack"), (&result,))
        .or_else(|_| namespace.call_method1(intern!(py, "asarray"), (&result,)))
}

/// The sizes of a tensor as its caller has them.
pub(crate) fn shape<'a>(tensor: &'a Tensor<'_>) -> &'a [usize] {
    &tensor.sizes[AXES - tensor.axes.min(AXES)..]
}
