//! [`Batch`]: a message of a `BatchQueue`, whose arrays are in its DATA part.
//!
//! The MSG part has a length (four bytes, little endian), a text of that length with the layout of the arrays, and the
//! producer's metadata. The text is encoded once for all batches with the same shapes, and a receiver compares it with the
//! layouts that it knows. So neither side handles it in Python for each batch.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use numpy::npyffi::{PY_ARRAY_API, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray};
use pyo3::exceptions::PyKeyError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyIterator, PyList, PyTuple};
use shmesh::config::PoolId;

use crate::error::error;
use crate::handle::Handle;
use crate::loan::Loan;
use crate::message::{Message, Part};
use crate::view;

/// Size of the length field in bytes.
const LENGTH_BYTES: usize = 4;
/// Maximum number of layouts that a receiver compares a text with before it decodes it.
const KNOWN_MAX: usize = 8;

/// The location of one array.
struct ArrayLocation {
    key: String,
    dims: Vec<npy_intp>,
    dtype: Py<PyArrayDescr>,
    offset: usize,
    /// The offset of its end; `None` if that overflows.
    end: Option<usize>,
}

/// The location of all arrays of a batch.
pub(crate) struct Layout {
    /// Length and text, which begin the MSG part.
    header: Vec<u8>,
    /// Size of the DATA part in bytes.
    nbytes: usize,
    places: Vec<ArrayLocation>,
    index: HashMap<String, usize>,
}

impl Layout {
    fn place(&self, key: &Bound<'_, PyAny>) -> PyResult<&ArrayLocation> {
        let found = key.extract::<&str>().ok().and_then(|name| self.index.get(name));
        found
            .and_then(|&index| self.places.get(index))
            .ok_or_else(|| PyKeyError::new_err(key.clone().unbind()))
    }
}

/// A layout, as a Python object.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct BatchLayout(Arc<Layout>);

#[pymethods]
impl BatchLayout {
    /// `places` has the key, shape, data type (without Python objects) and offset of each array.
    #[new]
    fn new(
        text: &[u8],
        nbytes: usize,
        places: Vec<(String, Vec<npy_intp>, Bound<'_, PyArrayDescr>, usize)>,
    ) -> PyResult<Self> {
        let length = u32::try_from(text.len())
            .map_err(|_| error("TooLong", format_args!("{} bytes describe a batch", text.len())))?;
        let places: Vec<_> = places
            .into_iter()
            .map(|(key, dims, dtype, offset)| {
                if dtype.has_object() {
                    return Err(error(
                        "Unsupported",
                        format_args!("array {key}: {dtype} holds Python objects"),
                    ));
                }
                let elements = dims
                    .iter()
                    .try_fold(1_usize, |all, &length| all.checked_mul(usize::try_from(length).ok()?));
                let end = elements.and_then(|all| all.checked_mul(dtype.itemsize())?.checked_add(offset));
                Ok(ArrayLocation { key, dims, dtype: dtype.unbind(), offset, end })
            })
            .collect::<PyResult<_>>()?;
        let index = places.iter().enumerate().map(|(index, place)| (place.key.clone(), index)).collect();
        let header = [&length.to_le_bytes(), text].concat();
        Ok(Self(Arc::new(Layout { header, nbytes, places, index })))
    }

    /// Size of the DATA part in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.nbytes
    }

    /// Size of the MSG part without the producer's metadata.
    #[getter]
    fn header_bytes(&self) -> usize {
        self.0.header.len()
    }
}

/// The layouts of the batches that a participant received last.
#[derive(Default)]
pub(crate) struct KnownLayouts(Mutex<Vec<Arc<Layout>>>);

impl KnownLayouts {
    /// The layout with which these bytes begin.
    fn of(&self, msg: &[u8]) -> Option<Arc<Layout>> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().find(|layout| msg.starts_with(&layout.header)).cloned()
    }

    fn learn(&self, layout: &Arc<Layout>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = (known.len() == KNOWN_MAX).then(|| known.remove(0));
        known.push(Arc::clone(layout));
        drop(known);
        // Its Python objects may have finalizers.
        drop(oldest);
    }
}

enum BatchContent {
    Written(Loan),
    Received(Message),
}

/// Arrays by name: a batch being written, from `BatchQueue.batch`, or a received one.
///
/// The arrays are in shared memory. In a received batch they are read-only, and its memory is reused when they and the
/// batch are gone. A batch being written can be sent when none of its arrays is alive: write to ``batch["x"][...]``, or
/// ``del`` arrays that were taken out.
#[pyclass(frozen, module = "shmesh._shmesh")]
pub(crate) struct Batch {
    held: BatchContent,
    layout: Arc<Layout>,
    /// The metadata that the producer sent with it.
    #[pyo3(get)]
    meta: Py<PyAny>,
}

/// An array in the DATA part `data` of a buffer that `kept` keeps.
#[expect(unsafe_code, reason = "the bytes are those of a buffer that is kept")]
fn view_of<'py>(
    py: Python<'py>,
    place: &ArrayLocation,
    data: Part,
    writable: bool,
    kept: Arc<impl Send + Sync + 'static>,
) -> PyResult<Bound<'py, PyAny>> {
    if place.end.is_none_or(|end| end > data.len) {
        let text = format!("array {} of this batch is not inside its {} bytes", place.key, data.len);
        return Err(error("Damaged", text));
    }
    // SAFETY: the bytes of the array were just checked against the part, which stays valid while the buffer is kept, and
    // the type has no Python objects.
    let made = unsafe {
        let start = data.start.add(place.offset);
        view::array(py, start, place.dtype.bind(py).clone(), &place.dims, writable, kept)
    };
    made.map_err(|wrong| error("Damaged", format_args!("array {} of this batch: {wrong}", place.key)))
}

/// Loans buffers for a batch. Returns `None` while all buffers are in use.
fn loan_of(handle: &Arc<Handle>, layout: &Layout, extra: &[u8]) -> shmesh::Result<Option<Loan>> {
    let length = layout.header.len() + extra.len();
    let write = |bytes: &mut [u8]| {
        let (header, rest) = bytes.split_at_mut(layout.header.len());
        header.copy_from_slice(&layout.header);
        rest.copy_from_slice(extra);
    };
    match Loan::take_with(handle, length, write, Some((PoolId::CpuData, layout.nbytes))) {
        Ok(loan) => Ok(Some(loan)),
        Err(failed) if matches!(failed.kind(), shmesh::ErrorKind::Exhausted { .. }) => Ok(None),
        Err(failed) => Err(failed),
    }
}

/// Starts a batch to be written in place. Returns `None` while all buffers are in use.
pub(crate) fn begin(
    handle: &Arc<Handle>,
    layout: &BatchLayout,
    meta: Py<PyAny>,
    extra: &[u8],
) -> shmesh::Result<Option<Batch>> {
    let loan = loan_of(handle, &layout.0, extra)?;
    Ok(loan.map(|loan| Batch { held: BatchContent::Written(loan), layout: Arc::clone(&layout.0), meta }))
}

/// Sends a copy of these arrays, which have the types and shapes of the layout. Returns `False` while all buffers are in
/// use.
#[expect(unsafe_code, reason = "numpy copies between two arrays")]
pub(crate) fn put(
    py: Python<'_>,
    handle: &Arc<Handle>,
    layout: &BatchLayout,
    extra: &[u8],
    sources: &[Bound<'_, PyUntypedArray>],
) -> PyResult<bool> {
    let layout = &layout.0;
    let Some(loan) = loan_of(handle, layout, extra).map_err(crate::error::of_link)? else { return Ok(false) };
    for (place, source) in layout.places.iter().zip(sources) {
        let hold = loan.hold()?;
        let target = view_of(py, place, hold.data()?, true, hold)?;
        // SAFETY: both are arrays, and live until numpy has copied.
        if unsafe { PY_ARRAY_API.PyArray_CopyInto(py, target.as_ptr().cast(), source.as_ptr().cast()) } < 0 {
            return Err(PyErr::fetch(py));
        }
    }
    loan.do_send(0, 0, true)?;
    Ok(true)
}

/// Receives the oldest batch. `decode` creates the layout of an unknown text, `load` an object from the metadata. Both also
/// get the name of the queue.
pub(crate) fn receive(
    py: Python<'_>,
    handle: &Arc<Handle>,
    known: &KnownLayouts,
    name: &str,
    decode: &Bound<'_, PyAny>,
    load: &Bound<'_, PyAny>,
) -> PyResult<Option<Batch>> {
    let Some(message) = Message::take(handle).map_err(crate::error::of_link)? else { return Ok(None) };
    let found = message.with_msg(|msg| {
        known.of(msg).map(|layout| {
            let extra = msg.get(layout.header.len()..).filter(|extra| !extra.is_empty());
            let extra = extra.map(|extra| PyBytes::new(py, extra).unbind());
            (layout, extra)
        })
    })?;
    let (layout, extra) = match found {
        Some(found) => found,
        None => {
            let msg = message.with_msg(<[u8]>::to_vec)?;
            let parts = msg.split_first_chunk::<LENGTH_BYTES>().and_then(|(length, rest)| {
                rest.split_at_checked(usize::try_from(u32::from_le_bytes(*length)).ok()?)
            });
            let Some((text, extra)) = parts else {
                return Err(error(
                    "Damaged",
                    format_args!(
                        "queue {name}: received a message that is not a batch; use one kind of queue on both sides"
                    ),
                ));
            };
            let decoded = decode.call1((name, PyBytes::new(py, text)))?;
            let layout = Arc::clone(&decoded.cast::<BatchLayout>()?.get().0);
            known.learn(&layout);
            (layout, (!extra.is_empty()).then(|| PyBytes::new(py, extra).unbind()))
        }
    };
    let meta = match extra {
        Some(extra) => load.call1((name, extra))?.unbind(),
        None => py.None(),
    };
    Ok(Some(Batch { held: BatchContent::Received(message), layout, meta }))
}

#[pymethods]
impl Batch {
    fn __getitem__<'py>(&self, py: Python<'py>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let place = self.layout.place(key)?;
        match &self.held {
            BatchContent::Written(loan) => {
                let hold = loan.hold()?;
                view_of(py, place, hold.data()?, true, hold)
            }
            BatchContent::Received(message) => {
                let hold = message.hold()?;
                view_of(py, place, hold.data(), false, hold)
            }
        }
    }

    fn __contains__(&self, key: &Bound<'_, PyAny>) -> bool {
        self.layout.place(key).is_ok()
    }

    fn __len__(&self) -> usize {
        self.layout.places.len()
    }

    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyIterator>> {
        self.keys(py)?.try_iter()
    }

    /// The names of the arrays, in order.
    fn keys<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.layout.places.iter().map(|place| &place.key))
    }

    /// The arrays of the batch, in order.
    fn values<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        self.keys(py)?.iter().map(|key| self.__getitem__(py, &key)).collect()
    }

    /// Pairs of names and arrays, in order.
    fn items<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
        self.keys(py)?.iter().map(|key| Ok((key.clone(), self.__getitem__(py, &key)?))).collect()
    }

    /// The array with this name, or `default`.
    #[pyo3(signature = (key, default=None))]
    fn get<'py>(
        &self,
        py: Python<'py>,
        key: &Bound<'py, PyAny>,
        default: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        if self.__contains__(key) { self.__getitem__(py, key).map(Some) } else { Ok(default) }
    }

    /// Sends a batch that was written.
    fn send(&self) -> PyResult<()> {
        let BatchContent::Written(loan) = &self.held else {
            return Err(error(
                "Invalid",
                "this batch was received; only one from `BatchQueue.batch` can be sent",
            ));
        };
        if loan.is_late() {
            loan.drop();
            return Err(error(
                "Closed",
                "the queue was closed before this batch was sent, so it was not; send it, then close",
            ));
        }
        loan.do_send(0, 0, true)
    }

    /// Releases the batch. If it was received, its memory is free when its arrays are gone; if it was being written, it is
    /// not sent.
    fn release(&self) {
        match &self.held {
            BatchContent::Written(loan) => loan.drop(),
            BatchContent::Received(message) => message.release(),
        }
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Sends a batch being written, unless there was an exception or it was sent already. Releases a received batch.
    fn __exit__(
        &self,
        kind: &Bound<'_, PyAny>,
        _value: &Bound<'_, PyAny>,
        _traceback: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        match &self.held {
            BatchContent::Written(loan) => loan.leave(kind, || self.send()),
            BatchContent::Received(message) => {
                message.release();
                Ok(())
            }
        }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let arrays = self.layout.places.iter().map(|place| {
            let shape = PyTuple::new(py, &place.dims)?;
            Ok(format!("{}: {shape} {}", place.key, place.dtype.bind(py)))
        });
        Ok(format!("<shmesh.Batch {}>", arrays.collect::<PyResult<Vec<_>>>()?.join(", ")))
    }
}
