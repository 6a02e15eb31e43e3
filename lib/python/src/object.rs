//! Objects of plain values and numpy arrays, as Python's pickle writes and reads them, without its machinery.
//!
//! pickle creates a pickler and a buffer for each object, calls back into Python for each array, and imports what it
//! calls. For the objects that most messages are, this is several times as much as copying them. Here they are written and
//! read directly, in the same format (protocol 5); [`encode`] and [`decode`] leave every other object to pickle.
//!
//! Reading runs no code that the sender chooses.

use std::ptr::NonNull;
use std::sync::Arc;

use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    PyBool, PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyMemoryView, PyString, PyTuple, PyType,
};

use crate::message::{Message, MessageHold, Part};

/// The first bytes of the MSG part, `Obj1`.
const MAGIC: u32 = 0x316A_624F;
/// Size of the head in bytes: magic, number of buffers, bytes of pickle. The sizes of the buffers follow, then the pickle if it
/// fits.
const HEAD_BYTES: usize = 16;
/// Buffers are at multiples of this.
const ALIGN: usize = 64;
/// Maximum number of buffers of one object.
const BUFFERS_MAX: usize = 256;
/// Larger objects are left to pickle, which writes equal strings once.
const VALUES_MAX: usize = 256;
const DEPTH_MAX: usize = 32;
/// Text and bytes up to this length are written each time.
const SHORT_BYTES_MAX: usize = 64;
/// The element types that are written by name: those without fields, references and metadata.
const PLAIN_TYPES: [&str; 16] =
    ["?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D"];

/// The opcodes of pickle, protocol 5, that are used here.
mod op {
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const FRAME: u8 = 0x95;
    pub(super) const STOP: u8 = b'.';
    pub(super) const MARK: u8 = b'(';
    pub(super) const NONE: u8 = b'N';
    pub(super) const TRUE: u8 = 0x88;
    pub(super) const FALSE: u8 = 0x89;
    pub(super) const INT_1: u8 = b'K';
    pub(super) const INT_2: u8 = b'M';
    pub(super) const INT_4: u8 = b'J';
    pub(super) const LONG: u8 = 0x8a;
    pub(super) const FLOAT: u8 = b'G';
    pub(super) const SHORT_TEXT: u8 = 0x8c;
    pub(super) const TEXT: u8 = b'X';
    pub(super) const SHORT_BYTES: u8 = b'C';
    pub(super) const BYTES: u8 = b'B';
    pub(super) const BYTEARRAY: u8 = 0x96;
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const TUPLE_1: u8 = 0x85;
    pub(super) const TUPLE_2: u8 = 0x86;
    pub(super) const TUPLE_3: u8 = 0x87;
    pub(super) const TUPLE: u8 = b't';
    pub(super) const EMPTY_LIST: u8 = b']';
    pub(super) const APPEND: u8 = b'a';
    pub(super) const APPENDS: u8 = b'e';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const SET_ITEM: u8 = b's';
    pub(super) const SET_ITEMS: u8 = b'u';
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const GET: u8 = b'h';
    pub(super) const GLOBAL: u8 = 0x93;
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const NEXT_BUFFER: u8 = 0x97;
    pub(super) const READONLY: u8 = 0x98;
}

/// `numpy.ndarray`, and the element types with their names.
struct Numpy {
    ndarray: Py<PyType>,
    types: Vec<(Py<PyArrayDescr>, String)>,
}

impl Numpy {
    fn get(py: Python<'_>) -> PyResult<&Self> {
        static NUMPY: PyOnceLock<Numpy> = PyOnceLock::new();
        NUMPY.get_or_try_init(py, || {
            let named = |code: &&str| {
                let dtype = PyArrayDescr::new(py, *code)?;
                let name = dtype.getattr("str")?.extract()?;
                Ok((dtype.unbind(), name))
            };
            let types = PLAIN_TYPES.iter().map(named).collect::<PyResult<_>>()?;
            let ndarray = py.import("numpy")?.getattr("ndarray")?.cast_into::<PyType>()?.unbind();
            Ok(Self { ndarray, types })
        })
    }

    /// The name of an element type; `None` unless it is one of them itself: an equal one may have metadata.
    fn name_of(&self, dtype: &Bound<'_, PyArrayDescr>) -> Option<&str> {
        self.types.iter().find(|(known, _)| known.is(dtype)).map(|(_, name)| name.as_str())
    }

    fn type_of(&self, name: &str) -> Option<&Py<PyArrayDescr>> {
        self.types.iter().find(|(_, known)| known == name).map(|(dtype, _)| dtype)
    }
}

/// Writes an object. A `None` inside means: leave it to pickle.
struct Encoder<'a, 'py> {
    numpy: &'a Numpy,
    out: Vec<u8>,
    /// Arrays of at least so many bytes are buffers of their own.
    buffer_min: usize,
    buffers: Vec<(Bound<'py, PyUntypedArray>, usize)>,
    /// Containers and arrays that were written: none is written twice.
    seen: Vec<*mut ffi::PyObject>,
    values: usize,
    knows_ndarray: bool,
}

impl<'py> Encoder<'_, 'py> {
    fn save(&mut self, value: &Bound<'py, PyAny>, depth: usize) -> Option<()> {
        self.values += 1;
        if self.values > VALUES_MAX || depth > DEPTH_MAX {
            return None;
        }
        if value.is_none() {
            self.out.push(op::NONE);
        } else if let Ok(text) = value.cast_exact::<PyString>() {
            let text = text.to_str().ok()?;
            self.is_new_or_short(value, text.len())?;
            self.save_text(text)?;
        } else if let Ok(truth) = value.cast_exact::<PyBool>() {
            self.out.push(if truth.is_true() { op::TRUE } else { op::FALSE });
        } else if let Ok(number) = value.cast_exact::<PyInt>() {
            self.save_int(number.extract().ok()?);
        } else if let Ok(number) = value.cast_exact::<PyFloat>() {
            self.out.push(op::FLOAT);
            self.out.extend(number.value().to_be_bytes());
        } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            self.is_new_or_short(value, bytes.as_bytes().len())?;
            self.save_length(op::SHORT_BYTES, op::BYTES, bytes.as_bytes().len())?;
            self.out.extend(bytes.as_bytes());
        } else if value.get_type().is(&self.numpy.ndarray) {
            self.is_new(value)?;
            self.save_array(value.cast::<PyUntypedArray>().ok()?)?;
        } else if let Ok(dict) = value.cast_exact::<PyDict>() {
            self.is_new(value)?;
            self.out.extend([op::EMPTY_DICT, op::MARK]);
            // A copy, because iteration panics if another thread changes the dict.
            for pair in dict.items() {
                let pair = pair.cast_exact::<PyTuple>().ok()?;
                pair.iter_borrowed().try_for_each(|item| self.save(&item, depth + 1))?;
            }
            self.out.push(op::SET_ITEMS);
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            self.is_new(value)?;
            self.out.extend([op::EMPTY_LIST, op::MARK]);
            list.iter().try_for_each(|item| self.save(&item, depth + 1))?;
            self.out.push(op::APPENDS);
        } else if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            if tuple.is_empty() {
                self.out.push(op::EMPTY_TUPLE);
            } else {
                self.is_new(value)?;
                self.out.push(op::MARK);
                tuple.iter_borrowed().try_for_each(|item| self.save(&item, depth + 1))?;
                self.out.push(op::TUPLE);
            }
        } else {
            return None;
        }
        Some(())
    }

    /// `None` if it was written before: readers get one object in both places, and only pickle writes that.
    fn is_new(&mut self, value: &Bound<'py, PyAny>) -> Option<()> {
        if self.seen.contains(&value.as_ptr()) {
            return None;
        }
        self.seen.push(value.as_ptr());
        Some(())
    }

    /// As [`is_new`](Self::is_new), for text or bytes: repeated ones would take their room twice.
    fn is_new_or_short(&mut self, value: &Bound<'py, PyAny>, len: usize) -> Option<()> {
        if len <= SHORT_BYTES_MAX { Some(()) } else { self.is_new(value) }
    }

    fn save_length(&mut self, short: u8, long: u8, len: usize) -> Option<()> {
        if let Ok(len) = u8::try_from(len) {
            self.out.extend([short, len]);
        } else {
            self.out.push(long);
            self.out.extend(u32::try_from(len).ok()?.to_le_bytes());
        }
        Some(())
    }

    fn save_text(&mut self, text: &str) -> Option<()> {
        self.save_length(op::SHORT_TEXT, op::TEXT, text.len())?;
        self.out.extend(text.as_bytes());
        Some(())
    }

    fn save_int(&mut self, number: i64) {
        if let Ok(byte) = u8::try_from(number) {
            self.out.extend([op::INT_1, byte]);
        } else if let Ok(short) = u16::try_from(number) {
            self.out.push(op::INT_2);
            self.out.extend(short.to_le_bytes());
        } else if let Ok(int) = i32::try_from(number) {
            self.out.push(op::INT_4);
            self.out.extend(int.to_le_bytes());
        } else {
            self.out.extend([op::LONG, 8]);
            self.out.extend(number.to_le_bytes());
        }
    }

    fn save_array(&mut self, array: &Bound<'py, PyUntypedArray>) -> Option<()> {
        let dtype = array.dtype();
        let name = self.numpy.name_of(&dtype)?;
        let nbytes = array.len().checked_mul(dtype.itemsize())?;
        if nbytes == 0 || !array.is_c_contiguous() {
            return None;
        }
        if self.knows_ndarray {
            self.out.extend([op::GET, 0]);
        } else {
            self.save_text("numpy")?;
            self.save_text("ndarray")?;
            self.out.extend([op::GLOBAL, op::MEMOIZE]);
            self.knows_ndarray = true;
        }
        self.out.push(op::MARK);
        for &dim in array.shape() {
            self.save_int(i64::try_from(dim).ok()?);
        }
        self.out.push(op::TUPLE);
        self.save_text(name)?;
        let writable = is_writable(array);
        if nbytes >= self.buffer_min && self.buffers.len() < BUFFERS_MAX {
            self.buffers.push((array.clone(), nbytes));
            self.out.push(op::NEXT_BUFFER);
            if !writable {
                self.out.push(op::READONLY);
            }
        } else {
            if writable {
                self.out.push(op::BYTEARRAY);
                self.out.extend((nbytes as u64).to_le_bytes());
            } else {
                self.save_length(op::SHORT_BYTES, op::BYTES, nbytes)?;
            }
            append_bytes_of(array, nbytes, &mut self.out);
        }
        self.out.extend([op::TUPLE_3, op::REDUCE]);
        Some(())
    }
}

#[expect(unsafe_code, reason = "a flag that pyo3's numpy does not have")]
fn is_writable(array: &Bound<'_, PyUntypedArray>) -> bool {
    // SAFETY: the array lives as long as the reference.
    unsafe { (*array.as_array_ptr()).fields.flags & NPY_ARRAY_WRITEABLE != 0 }
}

/// Copies the bytes of a contiguous array to the end of `out`.
#[expect(unsafe_code, reason = "the memory of an array, which other threads may write")]
fn append_bytes_of(array: &Bound<'_, PyUntypedArray>, nbytes: usize, out: &mut Vec<u8>) {
    out.reserve(nbytes);
    // SAFETY: a contiguous array has as many bytes as its elements, and `out` was given room for them. The copy is not
    // through a reference, because a thread without the interpreter's lock may write the array.
    unsafe {
        std::ptr::copy_nonoverlapping(
            (*array.as_array_ptr()).fields.data.cast::<u8>(),
            out.as_mut_ptr().add(out.len()),
            nbytes,
        );
        out.set_len(out.len() + nbytes);
    }
}

const fn aligned(nbytes: usize) -> usize {
    nbytes.next_multiple_of(ALIGN)
}

/// The MSG part, what is in the DATA part with its offsets, and the size of the DATA part.
type ObjectParts<'py> = (Bound<'py, PyBytes>, Bound<'py, PyList>, usize);

/// The parts of an object for a buffer with `msg_bytes` in its MSG part. `None` for an object that pickle has to write.
#[pyfunction]
pub(crate) fn encode<'py>(
    value: &Bound<'py, PyAny>,
    msg_bytes: usize,
    buffer_min: usize,
) -> PyResult<Option<ObjectParts<'py>>> {
    let py = value.py();
    let mut encoder = Encoder {
        numpy: Numpy::get(py)?,
        out: vec![op::PROTO, 5],
        buffer_min,
        buffers: Vec::new(),
        seen: Vec::new(),
        values: 0,
        knows_ndarray: false,
    };
    if encoder.save(value, 0).is_none() {
        return Ok(None);
    }
    encoder.out.push(op::STOP);
    let Encoder { out: pickle, buffers, .. } = encoder;
    let mut head = Vec::with_capacity(HEAD_BYTES + 8 * buffers.len());
    head.extend(MAGIC.to_le_bytes());
    head.extend(u32::try_from(buffers.len()).unwrap_or(u32::MAX).to_le_bytes());
    head.extend((pickle.len() as u64).to_le_bytes());
    buffers.iter().for_each(|(_, nbytes)| head.extend((*nbytes as u64).to_le_bytes()));
    let data = PyList::empty(py);
    let mut nbytes = 0;
    let head = if head.len() + pickle.len() <= msg_bytes {
        PyBytes::new_with(py, head.len() + pickle.len(), |all| {
            let (first, rest) = all.split_at_mut(head.len());
            first.copy_from_slice(&head);
            rest.copy_from_slice(&pickle);
            Ok(())
        })?
    } else {
        nbytes = aligned(pickle.len());
        data.append((0, PyMemoryView::from(&PyBytes::new(py, &pickle))?))?;
        PyBytes::new(py, &head)
    };
    for (array, len) in buffers {
        data.append((nbytes, array))?;
        nbytes += aligned(len);
    }
    Ok(Some((head, data, nbytes)))
}

/// Reads an object. Everywhere, `None` means: leave it to pickle, which also has the errors.
struct Decoder<'a, 'py> {
    py: Python<'py>,
    numpy: &'a Numpy,
    pickle: &'a [u8],
    stack: Vec<Bound<'py, PyAny>>,
    marks: Vec<usize>,
    memo: Vec<Bound<'py, PyAny>>,
    buffers: DataBuffers<'a>,
}

/// The buffers in the DATA part of a message.
struct DataBuffers<'a> {
    hold: &'a Arc<MessageHold>,
    /// Sizes in bytes, eight bytes each.
    lengths: &'a [u8],
    offset: usize,
    copy: bool,
}

impl DataBuffers<'_> {
    fn next<'py>(&mut self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        let (length, rest) = self.lengths.split_first_chunk()?;
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        let part = part_of(self.hold.data(), self.offset, length)?;
        self.lengths = rest;
        self.offset = self.offset.checked_add(length)?.checked_next_multiple_of(ALIGN)?;
        if !self.copy {
            return part.array(py, Arc::clone(self.hold), false).ok();
        }
        copy_of(py, part)
    }
}

/// `length` bytes of a part.
fn part_of(data: Part, offset: usize, length: usize) -> Option<Part> {
    if offset.checked_add(length)? > data.len {
        return None;
    }
    #[expect(unsafe_code, reason = "an address inside of the part")]
    // SAFETY: the offset was just checked.
    let start: NonNull<u8> = unsafe { data.start.add(offset) };
    Some(Part { start, len: length })
}

/// A `bytearray` with the bytes of a part.
#[expect(unsafe_code, reason = "memory that another process may write meanwhile")]
fn copy_of(py: Python<'_>, part: Part) -> Option<Bound<'_, PyAny>> {
    let len = ffi::Py_ssize_t::try_from(part.len).ok()?;
    // SAFETY: the part is valid while its message is kept. Not through a reference, because its sender may still write it.
    unsafe {
        let made = ffi::PyByteArray_FromStringAndSize(part.start.as_ptr().cast(), len);
        Bound::from_owned_ptr_or_err(py, made).ok()
    }
}

/// Copies a part, as long as `out`.
#[expect(unsafe_code, reason = "memory that another process may write meanwhile")]
fn copy_out(part: Part, out: &mut [u8]) {
    assert_eq!(part.len, out.len(), "as long as the part");
    // SAFETY: the part is valid while its message is kept, and as long as `out`. Not through a reference, because its sender
    // may still write it.
    unsafe { std::ptr::copy_nonoverlapping(part.start.as_ptr(), out.as_mut_ptr(), out.len()) }
}

impl<'py> Decoder<'_, 'py> {
    fn take(&mut self, len: usize) -> Option<&[u8]> {
        let (taken, rest) = self.pickle.split_at_checked(len)?;
        self.pickle = rest;
        Some(taken)
    }

    fn number<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (number, rest) = self.pickle.split_first_chunk()?;
        self.pickle = rest;
        Some(*number)
    }

    fn length(&mut self, wide: bool) -> Option<usize> {
        if wide {
            usize::try_from(u32::from_le_bytes(self.number()?)).ok()
        } else {
            Some(usize::from(u8::from_le_bytes(self.number()?)))
        }
    }

    fn push(&mut self, value: impl IntoPyObject<'py>) -> Option<()> {
        let value = value.into_bound_py_any(self.py).ok()?;
        self.stack.push(value);
        Some(())
    }

    /// Takes the values since the last mark.
    fn since_mark(&mut self) -> Option<Vec<Bound<'py, PyAny>>> {
        let mark = self.marks.pop()?;
        (mark <= self.stack.len()).then(|| self.stack.split_off(mark))
    }

    fn last(&mut self, count: usize) -> Option<Vec<Bound<'py, PyAny>>> {
        let from = self.stack.len().checked_sub(count)?;
        Some(self.stack.split_off(from))
    }

    fn tuple(&mut self, items: Vec<Bound<'py, PyAny>>) -> Option<()> {
        let tuple = PyTuple::new(self.py, items).ok()?;
        self.push(tuple)
    }

    fn append(&self, items: &[Bound<'py, PyAny>]) -> Option<()> {
        let list = self.stack.last()?.cast_exact::<PyList>().ok()?;
        items.iter().try_for_each(|item| list.append(item).ok())
    }

    fn set(&self, items: &[Bound<'py, PyAny>]) -> Option<()> {
        let dict = self.stack.last()?.cast_exact::<PyDict>().ok()?;
        let (pairs, []) = items.as_chunks::<2>() else { return None };
        // A key is hashed: of tuples in tuples that would take as long, or as deep a stack, as their sender likes.
        let is_plain = |key: &Bound<'py, PyAny>| !key.is_instance_of::<PyTuple>();
        pairs.iter().try_for_each(|[key, item]| is_plain(key).then(|| dict.set_item(key, item).ok())?)
    }

    fn array(&mut self) -> Option<()> {
        let args = self.stack.pop()?;
        if !self.stack.pop()?.is(&self.numpy.ndarray) {
            return None;
        }
        let args = args.cast_exact::<PyTuple>().ok()?;
        let (shape, name, buffer) =
            args.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>, Bound<'_, PyAny>)>().ok()?;
        // Without one, numpy would make an array of what its memory held before.
        if buffer.is_none() {
            return None;
        }
        let dtype = self.numpy.type_of(name.cast_exact::<PyString>().ok()?.to_str().ok()?)?;
        let made = self.numpy.ndarray.bind(self.py).call1((shape, dtype, buffer)).ok()?;
        self.push(made)
    }

    fn run(mut self) -> Option<Bound<'py, PyAny>> {
        let py = self.py;
        loop {
            let [code] = self.number()?;
            match code {
                op::PROTO => {
                    let [2..=5] = self.number()? else { return None };
                }
                op::FRAME => drop(self.take(8)?),
                op::STOP => {
                    let value = self.stack.pop()?;
                    return (self.stack.is_empty() && self.marks.is_empty()).then_some(value);
                }
                op::MARK => self.marks.push(self.stack.len()),
                op::NONE => self.push(py.None())?,
                op::TRUE => self.push(true)?,
                op::FALSE => self.push(false)?,
                op::INT_1 => {
                    let number = u8::from_le_bytes(self.number()?);
                    self.push(number)?;
                }
                op::INT_2 => {
                    let number = u16::from_le_bytes(self.number()?);
                    self.push(number)?;
                }
                op::INT_4 => {
                    let number = i32::from_le_bytes(self.number()?);
                    self.push(number)?;
                }
                op::LONG => {
                    let len @ 1..=8 = self.length(false)? else { return None };
                    let mut number = [0; 8];
                    number[8 - len..].copy_from_slice(self.take(len)?);
                    self.push(i64::from_le_bytes(number) >> (64 - 8 * len))?;
                }
                op::FLOAT => {
                    let number = f64::from_be_bytes(self.number()?);
                    self.push(number)?;
                }
                op::SHORT_TEXT | op::TEXT => {
                    let len = self.length(code == op::TEXT)?;
                    let text = PyString::new(py, std::str::from_utf8(self.take(len)?).ok()?);
                    self.push(text)?;
                }
                op::SHORT_BYTES | op::BYTES => {
                    let len = self.length(code == op::BYTES)?;
                    let bytes = PyBytes::new(py, self.take(len)?);
                    self.push(bytes)?;
                }
                op::BYTEARRAY => {
                    let len = usize::try_from(u64::from_le_bytes(self.number()?)).ok()?;
                    let bytes = PyByteArray::new(py, self.take(len)?);
                    self.push(bytes)?;
                }
                op::EMPTY_TUPLE => self.tuple(Vec::new())?,
                op::TUPLE_1 | op::TUPLE_2 | op::TUPLE_3 => {
                    let items = self.last(usize::from(code - op::TUPLE_1) + 1)?;
                    self.tuple(items)?;
                }
                op::TUPLE => {
                    let items = self.since_mark()?;
                    self.tuple(items)?;
                }
                op::EMPTY_LIST => self.push(PyList::empty(py))?,
                op::APPEND => {
                    let items = self.last(1)?;
                    self.append(&items)?;
                }
                op::APPENDS => {
                    let items = self.since_mark()?;
                    self.append(&items)?;
                }
                op::EMPTY_DICT => self.push(PyDict::new(py))?,
                op::SET_ITEM => {
                    let items = self.last(2)?;
                    self.set(&items)?;
                }
                op::SET_ITEMS => {
                    let items = self.since_mark()?;
                    self.set(&items)?;
                }
                op::MEMOIZE => self.memo.push(self.stack.last()?.clone()),
                op::GET => {
                    let index = self.length(false)?;
                    self.stack.push(self.memo.get(index)?.clone());
                }
                op::GLOBAL => {
                    let names = self.last(2)?;
                    let [module, name] = names.as_slice() else { return None };
                    let text = |value: &Bound<'py, PyAny>, known: &str| {
                        value
                            .cast_exact::<PyString>()
                            .is_ok_and(|text| text.to_str().is_ok_and(|text| text == known))
                    };
                    if !text(module, "numpy") || !text(name, "ndarray") {
                        return None;
                    }
                    self.stack.push(self.numpy.ndarray.bind(py).clone().into_any());
                }
                op::REDUCE => self.array()?,
                op::NEXT_BUFFER => {
                    let buffer = self.buffers.next(py)?;
                    self.stack.push(buffer);
                }
                // Memory of a message is read-only already.
                op::READONLY if !self.buffers.copy => {}
                op::READONLY => {
                    let view = PyMemoryView::from(&self.stack.pop()?).ok()?;
                    self.push(view.call_method0("toreadonly").ok()?)?;
                }
                _ => return None,
            }
        }
    }
}

fn read<'py>(
    py: Python<'py>,
    numpy: &Numpy,
    head: &[u8],
    hold: &Arc<MessageHold>,
    copy: bool,
) -> Option<Bound<'py, PyAny>> {
    let (magic, rest) = head.split_first_chunk()?;
    let (count, rest) = rest.split_first_chunk()?;
    let (pickle_bytes, rest) = rest.split_first_chunk()?;
    let count = usize::try_from(u32::from_le_bytes(*count)).ok()?;
    if u32::from_le_bytes(*magic) != MAGIC || count > BUFFERS_MAX {
        return None;
    }
    let (lengths, rest) = rest.split_at_checked(8 * count)?;
    let pickle_bytes = usize::try_from(u64::from_le_bytes(*pickle_bytes)).ok()?;
    let mut outside = Vec::new();
    let (pickle, offset) = match rest.get(..pickle_bytes) {
        Some(pickle) => (pickle, 0),
        None => {
            let part = part_of(hold.data(), 0, pickle_bytes)?;
            outside.resize(pickle_bytes, 0);
            copy_out(part, &mut outside);
            (outside.as_slice(), aligned(pickle_bytes))
        }
    };
    let buffers = DataBuffers { hold, lengths, offset, copy };
    Decoder { py, numpy, pickle, stack: Vec::new(), marks: Vec::new(), memo: Vec::new(), buffers }.run()
}

/// The object in a message, in a tuple; with `copy`, independent of its buffers. `None` if pickle has to read it, or to say what
/// is wrong with it.
#[pyfunction]
pub(crate) fn decode<'py>(
    py: Python<'py>,
    message: &Message,
    copy: bool,
) -> PyResult<Option<(Bound<'py, PyAny>,)>> {
    let hold = message.hold()?;
    // A copy, because the sender could still change it.
    let head = hold.msg().to_vec();
    Ok(read(py, Numpy::get(py)?, &head, &hold, copy).map(|value| (value,)))
}
