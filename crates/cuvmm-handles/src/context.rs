//! [`PrimaryContext`]: a share of a device's primary context, and that current, for the calls that need one.
//!
//! # Safety
//! A context is pushed while a share of it is held, and popped by the thread that pushed it before the share is given
//! back.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use cuvmm_driver::sys::CUcontext;
use cuvmm_driver::{Device, Error, StrandedKind};

/// A share of a device's primary context, which exists while anybody has one. It is given back when this is dropped.
///
/// No call of virtual memory management needs a context, but for the export of dma-bufs; streams and copies do.
///
/// ```
/// # use cuvmm_handles::*;
/// # use cuvmm_sim::{Machine, Simulator};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let device = Simulator::new(Machine::h200()).driver()?.device(0)?;
/// let primary = PrimaryContext::retain(&device)?;
/// assert!(device.primary_ctx_is_active()?);
/// primary.release()?;
/// assert!(!device.primary_ctx_is_active()?);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "it is given back when dropped"]
pub struct PrimaryContext {
    device: Device,
    context: CUcontext,
    released: bool,
}

impl PrimaryContext {
    /// Takes a share, and makes the context where nobody has one (`cuDevicePrimaryCtxRetain`). It is not made current.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn retain(device: &Device) -> Result<Self, Error> {
        Ok(Self { device: device.clone(), context: device.primary_ctx_retain()?, released: false })
    }

    /// The device that it is of.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The context, alive as long as this.
    pub fn as_raw(&self) -> CUcontext {
        self.context
    }

    /// Gives the share back, as dropping it does, and says how that went.
    ///
    /// # Errors
    /// What `cuDevicePrimaryCtxRelease` answers.
    #[doc(alias = "cuDevicePrimaryCtxRelease")]
    pub fn release(mut self) -> Result<(), Error> {
        self.give_back()
    }

    fn give_back(&mut self) -> Result<(), Error> {
        let driver = self.device.driver();
        if std::mem::replace(&mut self.released, true) || driver.is_forked() {
            return Ok(());
        }
        // SAFETY: the share was taken by this value, and `released` makes this the only time that it is given back.
        let result = unsafe { self.device.primary_ctx_release() };
        result.inspect_err(|error| driver.strand(StrandedKind::Other, error, "a primary context was not released"))
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        if !self.released && self.device.driver().may_drop("a share of a primary context is kept") {
            // A failure was counted and reported.
            let _ = self.give_back();
        }
    }
}

/// A device's primary context, current on this thread until this is dropped.
pub(crate) struct Current {
    primary: Option<PrimaryContext>,
    /// The thread that pushed is the one that pops.
    _this_thread: PhantomData<*const ()>,
}

impl Current {
    pub(crate) fn push(device: &Device) -> Result<Self, Error> {
        let primary = PrimaryContext::retain(device)?;
        // SAFETY: the context is alive, as this share of it is.
        unsafe { device.driver().ctx_push_current(primary.context) }?;
        Ok(Self { primary: Some(primary), _this_thread: PhantomData })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        let Some(primary) = self.primary.take() else { return };
        let driver = primary.device.driver();
        // SAFETY: this thread pushed it, and whatever was pushed since was popped.
        if let Err(error) = unsafe { driver.ctx_pop_current() } {
            driver.strand(StrandedKind::Other, &error, "a context was left current");
            // What is current is not given back.
            std::mem::forget(primary);
        }
    }
}
