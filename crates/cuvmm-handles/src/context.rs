//! A current context, for the one call here that needs one.
//!
//! # Safety
//! A context is pushed while a reference to it is held, and popped by the thread that pushed it before the reference is
//! given back.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use cuvmm_driver::{Device, Error, StrandedKind};

/// A device's primary context, current on this thread until this is dropped.
pub(crate) struct Current<'a> {
    device: &'a Device,
    /// The thread that pushed is the one that pops.
    _this_thread: PhantomData<*const ()>,
}

impl<'a> Current<'a> {
    pub(crate) fn push(device: &'a Device) -> Result<Self, Error> {
        let driver = device.driver();
        let context = device.primary_ctx_retain()?;
        // SAFETY: the context is alive, as it was retained just now.
        if let Err(error) = unsafe { driver.ctx_push_current(context) } {
            give_back(device);
            return Err(error);
        }
        Ok(Self { device, _this_thread: PhantomData })
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let driver = self.device.driver();
        // SAFETY: this thread pushed it, and whatever was pushed since was popped.
        if let Err(error) = unsafe { driver.ctx_pop_current() } {
            driver.strand(StrandedKind::Other, &error, "a context was left current");
            return;
        }
        give_back(self.device);
    }
}

fn give_back(device: &Device) {
    // SAFETY: the reference was retained here, once, and nothing of the context is used by whom it was retained for.
    if let Err(error) = unsafe { device.primary_ctx_release() } {
        device.driver().strand(StrandedKind::Other, &error, "a primary context was not released");
    }
}
