//! Objects of plain values and numpy arrays, as Python's pickle writes and reads them, without its machinery.
//!
//! pickle creates a pickler and a buffer for each object, calls back into Python for each array, and imports what it
//! calls. For the objects that most messages are, this is several times as much as copying them. Here they are written and
//! read directly, in the same format (protocol 5); [`encode`] and [`decode`] leave every other object to pickle.
//!
//! [`decode`] reads more than [`encode`] writes: all plain values, and arrays and numbers of numpy, that pickle writes with the
//! reducers of `_objects.py`. Reading runs no code that the sender chooses, and takes no more time and stack than the bytes of the
//! object let expect. So it alone reads what a sender that is not trusted has sent.

use std::ptr::NonNull;
use std::sync::Arc;

use numpy::npyffi::NPY_ARRAY_WRITEABLE;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::IntoPyObjectExt;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{
    IntoPyDict, PyBool, PyByteArray, PyBytes, PyComplex, PyDict, PyFloat, PyInt, PyList, PyMemoryView, PySet,
    PyString, PyTuple, PyType,
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
pub(crate) const BUFFERS_MAX: usize = 256;
/// Larger objects are left to pickle, which writes equal strings once.
const VALUES_MAX: usize = 256;
const DEPTH_MAX: usize = 32;
/// Text and bytes up to this length are written each time.
const SHORT_BYTES_MAX: usize = 64;
/// The element types that are written by name: those without fields, references and metadata.
pub(crate) const PLAIN_TYPES: &str = "?bBhHiIlLqQefdFD";
/// The kinds of element types whose values are their bytes: numbers, times and text.
const KINDS_OF_VALUES: &str = "biufcmMSU";
/// Maximum length of the name of an element type.
const TYPE_NAME_MAX: usize = 32;
/// Maximum number of numbers as keys. Hashes of numbers are no secret, so a sender can choose some that are all looked for in one
/// row of places: the time grows by the square of their number.
const NUMBERS_AS_KEYS_MAX: usize = 4096;

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
    pub(super) const EMPTY_SET: u8 = 0x8f;
    pub(super) const ADD_ITEMS: u8 = 0x90;
    pub(super) const MEMOIZE: u8 = 0x94;
    pub(super) const GET: u8 = b'h';
    pub(super) const GET_4: u8 = b'j';
    pub(super) const GLOBAL: u8 = 0x93;
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const NEXT_BUFFER: u8 = 0x97;
    pub(super) const READONLY: u8 = 0x98;
}

/// `numpy.ndarray`, the element types with their names, and the types of their numbers.
struct Numpy {
    ndarray: Py<PyType>,
    frombuffer: Py<PyAny>,
    types: Vec<(Py<PyArrayDescr>, String)>,
    numbers: Vec<(Py<PyType>, String)>,
}

impl Numpy {
    fn get(py: Python<'_>) -> PyResult<&Self> {
        static NUMPY: PyOnceLock<Numpy> = PyOnceLock::new();
        NUMPY.get_or_try_init(py, || {
            let (mut types, mut numbers) = (Vec::new(), Vec::new());
            for code in PLAIN_TYPES.chars() {
                let dtype = PyArrayDescr::new(py, code.to_string())?;
                let number = dtype.getattr("type")?.cast_into::<PyType>()?;
                numbers.push((number.clone().unbind(), number.name()?.to_string()));
                let name = dtype.getattr("str")?.extract()?;
                types.push((dtype.unbind(), name));
            }
            let numpy = py.import("numpy")?;
            let ndarray = numpy.getattr("ndarray")?.cast_into::<PyType>()?.unbind();
            let frombuffer = numpy.getattr("frombuffer")?.unbind();
            Ok(Self { ndarray, frombuffer, types, numbers })
        })
    }

    /// The name of an element type; `None` unless it is one of them itself: an equal one may have metadata.
    fn name_of(&self, dtype: &Bound<'_, PyArrayDescr>) -> Option<&str> {
        self.types.iter().find(|(known, _)| known.is(dtype)).map(|(_, name)| name.as_str())
    }

    /// The element type with this name; `None` unless its values are their bytes.
    fn type_of<'py>(&self, py: Python<'py>, name: &str) -> Option<Bound<'py, PyArrayDescr>> {
        if let Some((dtype, _)) = self.types.iter().find(|(_, known)| known == name) {
            return Some(dtype.bind(py).clone());
        }
        let is_one = name.len() <= TYPE_NAME_MAX && !name.contains([',', '(']);
        let dtype = is_one.then(|| PyArrayDescr::new(py, name).ok())??;
        KINDS_OF_VALUES.contains(char::from(dtype.kind())).then_some(dtype)
    }

    /// A class that objects may name.
    fn class<'py>(&self, py: Python<'py>, module: &str, name: &str) -> Option<Bound<'py, PyType>> {
        match (module, name) {
            ("numpy", "ndarray") => Some(self.ndarray.bind(py).clone()),
            ("numpy", name) => {
                let (number, _) = self.numbers.iter().find(|(_, known)| known == name)?;
                Some(number.bind(py).clone())
            }
            ("builtins", "complex") => Some(py.get_type::<PyComplex>()),
            _ => None,
        }
    }

    /// Whether a number is hashed in a time that does not depend on it, and has the hash of few others: complex numbers and
    /// integers of any length can all have one.
    fn is_key(&self, value: &Bound<'_, PyAny>) -> bool {
        let is_number = || {
            let class = value.get_type();
            self.numbers.iter().any(|(number, name)| class.is(number) && !name.starts_with("complex"))
        };
        value.is_exact_instance_of::<PyInt>() && value.extract::<i64>().is_ok()
            || value.is_exact_instance_of::<PyFloat>()
            || value.is_exact_instance_of::<PyBool>()
            || value.is_none()
            || is_number()
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
    let buffers = encoder.buffers.into_iter().map(|(array, len)| (array.into_any(), len)).collect();
    parts(py, &encoder.out, buffers, msg_bytes).map(Some)
}

/// As `encode`, of a pickle and its buffers with their lengths.
#[pyfunction]
#[pyo3(name = "object_parts")]
pub(crate) fn parts<'py>(
    py: Python<'py>,
    pickle: &[u8],
    buffers: Vec<(Bound<'py, PyAny>, usize)>,
    msg_bytes: usize,
) -> PyResult<ObjectParts<'py>> {
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
            rest.copy_from_slice(pickle);
            Ok(())
        })?
    } else {
        nbytes = aligned(pickle.len());
        data.append((0, PyMemoryView::from(&PyBytes::new(py, pickle))?))?;
        PyBytes::new(py, &head)
    };
    for (buffer, len) in buffers {
        data.append((nbytes, buffer))?;
        nbytes += aligned(len);
    }
    Ok((head, data, nbytes))
}

/// The head of an object's message: what it says of the sizes, and what follows it in the MSG part.
struct Head<'a> {
    pickle_bytes: usize,
    /// Eight bytes for each buffer.
    lengths: &'a [u8],
    rest: &'a [u8],
}

impl<'a> Head<'a> {
    fn of(msg: &'a [u8]) -> Option<Self> {
        let (magic, rest) = msg.split_first_chunk()?;
        let (count, rest) = rest.split_first_chunk()?;
        let (pickle_bytes, rest) = rest.split_first_chunk()?;
        let count = usize::try_from(u32::from_le_bytes(*count)).ok()?;
        if u32::from_le_bytes(*magic) != MAGIC || count > BUFFERS_MAX {
            return None;
        }
        let (lengths, rest) = rest.split_at_checked(8 * count)?;
        let pickle_bytes = usize::try_from(u64::from_le_bytes(*pickle_bytes)).ok()?;
        Some(Self { pickle_bytes, lengths, rest })
    }

    /// The offset of the first buffer in the DATA part.
    fn first_offset(&self) -> Option<usize> {
        if self.pickle_bytes <= self.rest.len() { Some(0) } else { next_offset(0, self.pickle_bytes) }
    }
}

/// The offset of what follows a buffer in the DATA part.
fn next_offset(offset: usize, length: usize) -> Option<usize> {
    offset.checked_add(length)?.checked_next_multiple_of(ALIGN)
}

/// A start or an offset, and a length.
type Place = (usize, usize);

/// The places of an object's pickle, in the MSG part or else in the DATA part, and of its buffers in the DATA part. `None` if the MSG
/// part does not begin with the head of an object. The caller must check the places against the lengths of the parts.
#[pyfunction]
pub(crate) fn object_places(msg: &[u8]) -> Option<(bool, Place, Vec<Place>)> {
    let head = Head::of(msg)?;
    let is_in_msg = head.pickle_bytes <= head.rest.len();
    let start = if is_in_msg { msg.len() - head.rest.len() } else { 0 };
    let mut offset = head.first_offset()?;
    let mut places = Vec::new();
    for length in head.lengths.as_chunks().0 {
        let length = usize::try_from(u64::from_le_bytes(*length)).ok()?;
        places.push((offset, length));
        offset = next_offset(offset, length)?;
    }
    Some((is_in_msg, (start, head.pickle_bytes), places))
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
    numbers_as_keys: usize,
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
        self.offset = next_offset(self.offset, length)?;
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

    /// Refuses a key whose place a sender can make long to find. Text and bytes have hashes with a secret; tuples can share others
    /// to any depth.
    fn check_key(&mut self, key: &Bound<'py, PyAny>) -> Option<()> {
        if key.is_exact_instance_of::<PyString>() || key.is_exact_instance_of::<PyBytes>() {
            return Some(());
        }
        self.numbers_as_keys += 1;
        (self.numbers_as_keys <= NUMBERS_AS_KEYS_MAX && self.numpy.is_key(key)).then_some(())
    }

    fn set(&mut self, items: &[Bound<'py, PyAny>]) -> Option<()> {
        let (pairs, []) = items.as_chunks::<2>() else { return None };
        pairs.iter().try_for_each(|[key, _]| self.check_key(key))?;
        let dict = self.stack.last()?.cast_exact::<PyDict>().ok()?;
        pairs.iter().try_for_each(|[key, item]| dict.set_item(key, item).ok())
    }

    fn add(&mut self, items: &[Bound<'py, PyAny>]) -> Option<()> {
        items.iter().try_for_each(|item| self.check_key(item))?;
        let set = self.stack.last()?.cast_exact::<PySet>().ok()?;
        items.iter().try_for_each(|item| set.add(item).ok())
    }

    fn class(&mut self) -> Option<()> {
        let names = self.last(2)?;
        let [module, name] = names.as_slice() else { return None };
        let [module, name] = [module, name].map(|name| name.cast_exact::<PyString>().ok()?.to_str().ok());
        let class = self.numpy.class(self.py, module?, name?)?;
        self.push(class)
    }

    fn reduce(&mut self) -> Option<()> {
        let args = self.stack.pop()?.cast_into_exact::<PyTuple>().ok()?;
        let class = self.stack.pop()?.cast_into_exact::<PyType>().ok()?;
        let made = if class.is(&self.numpy.ndarray) {
            self.array(&args)?
        } else {
            // One of numpy's numbers, or a complex number.
            let is_number = |arg: Borrowed<'_, '_, PyAny>| {
                arg.is_exact_instance_of::<PyInt>()
                    || arg.is_exact_instance_of::<PyFloat>()
                    || arg.is_exact_instance_of::<PyBool>()
                    || arg.is_exact_instance_of::<PyComplex>()
            };
            let is_one = args.len() <= 2 && args.iter_borrowed().all(is_number);
            is_one.then(|| class.call1(args).ok())??
        };
        self.push(made)
    }

    fn array(&self, args: &Bound<'py, PyTuple>) -> Option<Bound<'py, PyAny>> {
        let arg = |i| args.get_item(i).ok();
        let dtype = self.numpy.type_of(self.py, arg(1)?.cast_exact::<PyString>().ok()?.to_str().ok()?)?;
        let (shape, ndarray) = (arg(0)?, self.numpy.ndarray.bind(self.py));
        let buffer = || {
            let buffer = arg(2)?;
            if !buffer.is_exact_instance_of::<PyByteArray>() {
                // Without one, numpy would make an array of what its memory held before.
                return (!buffer.is_none()).then_some(buffer);
            }
            // The array itself would not keep it from being shortened, and a sender can give it to the program as a value, too.
            self.numpy.frombuffer.bind(self.py).call1((buffer, "u1")).ok()
        };
        let made = match args.len() {
            // Without a buffer only if it needs none.
            2 => {
                let shape = shape.cast_into_exact::<PyTuple>().ok()?;
                let is_empty =
                    shape.iter_borrowed().any(|len| len.extract::<u64>().is_ok_and(|len| len == 0));
                is_empty.then(|| ndarray.call1((shape, dtype)))?
            }
            3 => ndarray.call1((shape, dtype, buffer()?)),
            6 if arg(4)?.is_none() => ndarray.call1((shape, dtype, buffer()?, arg(3)?, arg(4)?, arg(5)?)),
            _ => return None,
        };
        made.ok()
    }

    fn text(&mut self, len: usize) -> Option<()> {
        let py = self.py;
        let bytes = self.take(len)?;
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => PyString::new(py, text).into_any(),
            // As pickle, which writes halves of surrogate pairs, too.
            Err(_) => PyBytes::new(py, bytes).call_method1("decode", ("utf-8", "surrogatepass")).ok()?,
        };
        self.push(text)
    }

    fn long(&mut self) -> Option<()> {
        let len = self.length(false)?;
        if let 1..=8 = len {
            let mut number = [0; 8];
            number[8 - len..].copy_from_slice(self.take(len)?);
            return self.push(i64::from_le_bytes(number) >> (64 - 8 * len));
        }
        let py = self.py;
        let bytes = PyBytes::new(py, self.take(len)?);
        let signed = [("signed", true)].into_py_dict(py).ok()?;
        let number =
            py.get_type::<PyInt>().call_method("from_bytes", (bytes, "little"), Some(&signed)).ok()?;
        self.push(number)
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
                op::LONG => self.long()?,
                op::FLOAT => {
                    let number = f64::from_be_bytes(self.number()?);
                    self.push(number)?;
                }
                op::SHORT_TEXT | op::TEXT => {
                    let len = self.length(code == op::TEXT)?;
                    self.text(len)?;
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
                op::EMPTY_SET => self.push(PySet::empty(py).ok()?)?,
                op::ADD_ITEMS => {
                    let items = self.since_mark()?;
                    self.add(&items)?;
                }
                op::MEMOIZE => self.memo.push(self.stack.last()?.clone()),
                op::GET | op::GET_4 => {
                    let index = self.length(code == op::GET_4)?;
                    self.stack.push(self.memo.get(index)?.clone());
                }
                op::GLOBAL => self.class()?,
                op::REDUCE => self.reduce()?,
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
    msg: &[u8],
    hold: &Arc<MessageHold>,
    copy: bool,
) -> Option<Bound<'py, PyAny>> {
    let head = Head::of(msg)?;
    let mut outside = Vec::new();
    let pickle = match head.rest.get(..head.pickle_bytes) {
        Some(pickle) => pickle,
        None => {
            let part = part_of(hold.data(), 0, head.pickle_bytes)?;
            outside.resize(head.pickle_bytes, 0);
            copy_out(part, &mut outside);
            outside.as_slice()
        }
    };
    let (lengths, offset) = (head.lengths, head.first_offset()?);
    let buffers = DataBuffers { hold, lengths, offset, copy };
    Decoder {
        py,
        numpy,
        pickle,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::new(),
        buffers,
        numbers_as_keys: 0,
    }
    .run()
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
    let msg = hold.msg().to_vec();
    Ok(read(py, Numpy::get(py)?, &msg, &hold, copy).map(|value| (value,)))
}
