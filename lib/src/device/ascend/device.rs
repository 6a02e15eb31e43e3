//! An NPU, by its number in this process: the vendor has no UUID for it.

#![allow(unsafe_code, reason = "calls of a C library")]

use std::io;

use super::driver::Driver;
use super::explain::check;

/// An NPU that this process sees.
///
/// ```
/// use shmesh::device::AscendDevice;
/// match AscendDevice::all() {
///     Ok(devices) => println!("{} NPUs", devices.len()),
///     Err(error) => println!("nothing here: {error}"), // no runtime, or no device
/// }
/// ```
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct AscendDevice {
    number: i32,
}

/// While it lives, this thread has the device.
#[derive(Debug)]
pub(super) struct CurrentContext {
    /// The context that the thread had, where that had to give way.
    before: Option<usize>,
}

impl AscendDevice {
    /// All that this process sees.
    ///
    /// # Errors
    /// There is no runtime, or it does not say.
    pub fn all() -> io::Result<Vec<Self>> {
        let mut count = 0;
        let call = Driver::get()?.aclrtGetDeviceCount()?;
        // SAFETY: there is room for the answer.
        check("aclrtGetDeviceCount", unsafe { call(&raw mut count) })?;
        Ok((0..count).filter_map(|number| i32::try_from(number).ok()).map(|number| Self { number }).collect())
    }

    /// The one that this thread has, or the first.
    pub(super) fn current() -> io::Result<Self> {
        Ok(Self { number: bound(Driver::get()?)?.unwrap_or(0) })
    }

    /// Its number in this process alone: containers number their own.
    ///
    /// ```
    /// use shmesh::device::AscendDevice;
    /// for (number, device) in AscendDevice::all().unwrap_or_default().iter().enumerate() {
    ///     assert_eq!(device.number() as usize, number);
    /// }
    /// ```
    #[must_use]
    pub fn number(&self) -> i32 {
        self.number
    }

    /// Gives this thread the device, and in the end the context back that it had before. A thread that had none keeps the
    /// device: the runtime has no call for leaving it that would not end the work of others there.
    pub(super) fn enter(&self) -> io::Result<CurrentContext> {
        let driver = Driver::get()?;
        // Any context of the device does, so the caller's own stays.
        if bound(driver)? == Some(self.number) {
            return Ok(CurrentContext { before: None });
        }
        let mut before = 0;
        // SAFETY: there is room for the address.
        let code = unsafe { driver.aclrtGetCurrentContext()?(&raw mut before) };
        // SAFETY: it takes a number.
        check("aclrtSetDevice", unsafe { driver.aclrtSetDevice()?(self.number) })?;
        Ok(CurrentContext { before: (code == 0 && before != 0).then_some(before) })
    }
}

/// The device of this thread.
fn bound(driver: &Driver) -> io::Result<Option<i32>> {
    let mut number = 0;
    // SAFETY: there is room for the answer.
    let code = unsafe { driver.aclrtGetDevice()?(&raw mut number) };
    // Whatever else it says, this thread has none.
    Ok((code == 0).then_some(number))
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        if let Some(before) = self.before
            && let Ok(set) = Driver::get().and_then(Driver::aclrtSetCurrentContext)
        {
            // SAFETY: this thread had it before; the runtime knows its contexts, and refuses one that has ended.
            unsafe { set(before) };
        }
    }
}
