//! [`Driver`]: a started driver, cheap to clone, through which every typed call goes.
//!
//! # Safety
//! Each raw call is given outputs of its own and inputs that outlive it. The system's driver is kept for good.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_char};
use std::path::Path;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::device::{Device, Facts};
use crate::error::Error;
use crate::process::process_id;
use crate::raw::{Call, RawDriver};
use crate::retained::Retained;
use crate::stranded::Stranded;
use crate::sys::{CUcontext, CUdevice, CUresult, CUuuid, CudaVersion};
use crate::table::{LoadError, Table};

/// A driver that was started: typed calls go through it, and all that is made through it keeps a clone of it.
///
/// Two drivers are equal when one is a clone of the other. Values of two different ones never meet in a call:
/// that is [`Error::DifferentDrivers`].
#[derive(Clone)]
pub struct Driver {
    inner: Arc<Inner>,
}

struct Inner {
    raw: Box<dyn RawDriver>,
    process: u32,
    version: CudaVersion,
    devices: Box<[Facts]>,
    stranded: Stranded,
    retained: Retained,
}

/// The system's own driver, once it is loaded: a box that is never freed. It is no lock, which a process that is forked
/// just then would wait for.
static SYSTEM: AtomicPtr<Driver> = AtomicPtr::new(ptr::null_mut());

impl Driver {
    /// Loads `libcuda.so.1` and starts it. Later calls give clones of the same driver; it is never unloaded.
    ///
    /// # Errors
    /// [`LoadError::LibraryNotFound`] without an NVIDIA driver, [`LoadError::MissingSymbol`] with one that is too
    /// old, [`LoadError::Init`] with the code of cuInit where there is a driver and no usable device, and with
    /// [`Error::Forked`] in a process that was forked from one that had loaded it.
    pub fn load() -> Result<Self, LoadError> {
        let mut kept = SYSTEM.load(Ordering::Acquire);
        if kept.is_null() {
            let made = Box::into_raw(Box::new(Self::new(Table::load()?)?));
            kept = match SYSTEM.compare_exchange(ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => made,
                Err(first) => {
                    // SAFETY: it is the box of just now; another thread was first, and nobody else knows of it.
                    drop(unsafe { Box::from_raw(made) });
                    first
                }
            };
        }
        // SAFETY: what is kept came of a box, and is never freed or changed.
        let driver = unsafe { &*kept };
        driver.require_own_process()?;
        Ok(driver.clone())
    }

    /// Loads the driver library at `path` and starts it. Each call makes a driver of its own, different from all
    /// others.
    ///
    /// # Safety
    /// As [`Table::load_from`].
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the file.
        let table = unsafe { Table::load_from(path) }?;
        Ok(Self::new(table)?)
    }

    /// Starts `raw` (cuInit) and asks once what never changes in a process: version and devices.
    ///
    /// # Errors
    /// Whatever cuInit or the two queries answer.
    pub fn new(raw: impl RawDriver + 'static) -> Result<Self, Error> {
        let raw: Box<dyn RawDriver> = Box::new(raw);
        // SAFETY: cuInit takes a number.
        check(&*raw, Call::cuInit, unsafe { raw.cuInit(0) })?;
        let mut version = CudaVersion::default();
        // SAFETY: the output is ours.
        check(&*raw, Call::cuDriverGetVersion, unsafe { raw.cuDriverGetVersion(&raw mut version.0) })?;
        let mut count = 0;
        // SAFETY: the output is ours.
        check(&*raw, Call::cuDeviceGetCount, unsafe { raw.cuDeviceGetCount(&raw mut count) })?;
        let devices = (0..count)
            .map(|ordinal| {
                let mut device = CUdevice::default();
                // SAFETY: the output is ours.
                check(&*raw, Call::cuDeviceGet, unsafe { raw.cuDeviceGet(&raw mut device, ordinal) })?;
                Ok(Facts::new(device))
            })
            .collect::<Result<_, Error>>()?;
        let (process, stranded, retained) = (process_id(), Stranded::default(), Retained::default());
        Ok(Self { inner: Arc::new(Inner { raw, process, version, devices, stranded, retained }) })
    }

    /// The calls themselves, for what has no typed form. In a forked child they are as good as the driver makes them, which
    /// answers nearly all with 3.
    pub fn raw(&self) -> &dyn RawDriver {
        &*self.inner.raw
    }

    /// The calls, for a typed one: none in a forked child.
    #[inline]
    pub(crate) fn calls(&self) -> Result<&dyn RawDriver, Error> {
        self.require_own_process()?;
        Ok(self.raw())
    }

    /// The CUDA version that the driver supports.
    pub fn version(&self) -> CudaVersion {
        self.inner.version
    }

    /// How many devices this process sees.
    pub fn device_count(&self) -> i32 {
        i32::try_from(self.inner.devices.len()).unwrap_or(i32::MAX)
    }

    /// The device of that ordinal. Makes no call.
    ///
    /// # Errors
    /// [`Error::NoSuchDevice`].
    pub fn device(&self, ordinal: i32) -> Result<Device, Error> {
        if (0..self.device_count()).contains(&ordinal) {
            Ok(Device::new(self.clone(), ordinal))
        } else {
            Err(Error::NoSuchDevice { ordinal, count: self.device_count() })
        }
    }

    /// Every device that this process sees, by ordinal. Makes no call.
    pub fn devices(&self) -> Vec<Device> {
        (0..self.device_count()).map(|ordinal| Device::new(self.clone(), ordinal)).collect()
    }

    /// The device of that identity, or none that this process sees. Asks each device for its own.
    ///
    /// # Errors
    /// As [`Device::uuid`].
    pub fn device_by_uuid(&self, uuid: CUuuid) -> Result<Option<Device>, Error> {
        for device in self.devices() {
            if device.uuid()? == uuid {
                return Ok(Some(device));
            }
        }
        Ok(None)
    }

    /// What cleaning up could not give back, over all that was made through this driver.
    pub fn stranded(&self) -> &Stranded {
        &self.inner.stranded
    }

    /// The memory to which references were taken by its address, over all that was made through this driver.
    pub fn retained(&self) -> &Retained {
        &self.inner.retained
    }

    /// Whether this process was forked from the one that started the driver: no call works here, so nothing is
    /// to be cleaned up.
    #[inline]
    pub fn is_forked(&self) -> bool {
        process_id() != self.inner.process
    }

    /// Refuses a process that was forked from the one that started the driver. Every typed call asks this first, and so
    /// does whatever takes a lock: another thread may have held it when the process was forked, and is not there to let
    /// go of it.
    ///
    /// ```
    /// # use cuvmm_sim::{Machine, Simulator};
    /// let driver = Simulator::new(Machine::h200()).driver()?;
    /// driver.require_own_process()?;
    /// # Ok::<(), cuvmm_driver::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Forked`].
    #[inline]
    pub fn require_own_process(&self) -> Result<(), Error> {
        if self.is_forked() { Err(Error::Forked) } else { Ok(()) }
    }

    /// Whether the calling thread is inside a host function or a destructor of the driver's, where every CUDA call is
    /// forbidden. Asked by one call without an effect (`cuCtxGetCurrent`), which is refused there: of the others some
    /// are not refused, but hang.
    ///
    /// ```
    /// # use cuvmm_sim::{Machine, Simulator};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let driver = Simulator::new(Machine::h200()).driver()?;
    /// assert!(!driver.is_in_host_function()?);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// What the driver answers.
    pub fn is_in_host_function(&self) -> Result<bool, Error> {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuCtxGetCurrent(&raw mut context) };
        if code == CUresult::NOT_PERMITTED {
            // The driver is not asked for its words for it: that would be two calls more where none may be made.
            return Ok(true);
        }
        self.check(Call::cuCtxGetCurrent, code)?;
        Ok(false)
    }

    /// Refuses values of another driver.
    ///
    /// # Errors
    /// [`Error::DifferentDrivers`].
    pub fn require_same(&self, other: &Self) -> Result<(), Error> {
        if self == other { Ok(()) } else { Err(Error::DifferentDrivers) }
    }

    pub(crate) fn facts(&self, ordinal: i32) -> Option<&Facts> {
        self.inner.devices.get(usize::try_from(ordinal).ok()?)
    }

    /// The result of a call that was made, with the driver's own words for a failure.
    pub(crate) fn check(&self, call: Call, code: CUresult) -> Result<(), Error> {
        check(self.raw(), call, code)
    }

    /// The result of a call that asks whether work is done: 600 says not yet.
    pub(crate) fn check_ready(&self, call: Call, code: CUresult) -> Result<bool, Error> {
        if code == CUresult::NOT_READY {
            return Ok(false);
        }
        self.check(call, code)?;
        Ok(true)
    }
}

impl PartialEq for Driver {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }
}

impl Eq for Driver {}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver")
            .field("version", &self.version().to_string())
            .field("devices", &self.device_count())
            .finish_non_exhaustive()
    }
}

fn check(raw: &dyn RawDriver, call: Call, code: CUresult) -> Result<(), Error> {
    if code.is_success() { Ok(()) } else { Err(failed(raw, call, code)) }
}

#[cold]
fn failed(raw: &dyn RawDriver, call: Call, code: CUresult) -> Error {
    if code == CUresult::NOT_SUPPORTED && !raw.provides(call) {
        return Error::Unsupported { symbol: call, since: call.symbol().version };
    }
    let mut name = ptr::null();
    // SAFETY: the output is ours.
    let named = unsafe { raw.cuGetErrorName(code, &raw mut name) };
    let mut text = ptr::null();
    // SAFETY: the output is ours.
    let described = unsafe { raw.cuGetErrorString(code, &raw mut text) };
    Error::Call {
        call,
        code,
        name: words(named, name).unwrap_or_else(|| code.known_name().unwrap_or("unnamed code").to_owned()),
        text: words(described, text).unwrap_or_else(|| "the driver has no text for it".to_owned()),
    }
}

/// The static string that a successful query gave.
fn words(code: CUresult, text: *const c_char) -> Option<String> {
    if !code.is_success() || text.is_null() {
        return None;
    }
    // SAFETY: the driver answered with one of its static strings, which end in NUL.
    Some(unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
