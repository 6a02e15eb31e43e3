//! An NPU, identified by its number in this process, because the vendor has no UUIDs.

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

/// Makes the device current in this thread until it is dropped.
#[derive(Debug)]
pub(super) struct CurrentContext {
    /// The context that was current before, if it was replaced.
    before: Option<usize>,
}

impl AscendDevice {
    /// All NPUs that this process sees.
    ///
    /// # Errors
    /// The runtime is missing, or the call fails.
    pub fn all() -> io::Result<Vec<Self>> {
        let mut count = 0;
        let call = Driver::get()?.aclrtGetDeviceCount()?;
        // SAFETY: there is room for the answer.
        check("aclrtGetDeviceCount", unsafe { call(&raw mut count) })?;
        Ok((0..count).filter_map(|number| i32::try_from(number).ok()).map(|number| Self { number }).collect())
    }

    /// The device that is current in this thread, or the first one.
    pub(super) fn current() -> io::Result<Self> {
        Ok(Self { number: bound(Driver::get()?)?.unwrap_or(0) })
    }

    /// Its number in this process only: each container has its own numbering.
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

    /// Makes the device current in this thread until the returned guard is dropped. A thread without a device keeps
    /// this one: the runtime has no call to leave a device that would not end the work of others on it.
    pub(super) fn enter(&self) -> io::Result<CurrentContext> {
        let driver = Driver::get()?;
        // Any context of the device suffices, so the caller's own stays.
        if bound(driver)? == Some(self.number) {
            return Ok(CurrentContext { before: None });
        }
        let mut before = 0;
        // SAFETY: the call writes the address to a local variable.
        let code = unsafe { driver.aclrtGetCurrentContext()?(&raw mut before) };
        // SAFETY: it takes a number.
        check("aclrtSetDevice", unsafe { driver.aclrtSetDevice()?(self.number) })?;
        Ok(CurrentContext { before: (code == 0 && before != 0).then_some(before) })
    }
}

/// The device that is current in this thread.
fn bound(driver: &Driver) -> io::Result<Option<i32>> {
    let mut number = 0;
    // SAFETY: there is room for the answer.
    let code = unsafe { driver.aclrtGetDevice()?(&raw mut number) };
    // On any error this thread has none.
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
