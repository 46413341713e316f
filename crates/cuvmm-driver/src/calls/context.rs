//! Contexts: which one is current on a thread, and each device's primary one.
//!
//! # Safety
//! Outputs are ours and read after success only; that a context is alive is the callers' promise.
#![allow(unsafe_code)]

use crate::device::Device;
use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

impl Driver {
    /// `cuCtxGetCurrent`: the calling thread's current context; null where it has none.
    ///
    /// # Errors
    /// 800 inside a host function, which is how to learn that one is inside; 4 while the driver shuts down.
    #[doc(alias = "cuCtxGetCurrent")]
    pub fn ctx_get_current(&self) -> Result<CUcontext, Error> {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuCtxGetCurrent(&raw mut context) };
        self.check(Call::cuCtxGetCurrent, code)?;
        Ok(context)
    }

    /// `cuCtxSetCurrent`: makes `context` the calling thread's current one, in place of the one that was; null
    /// leaves the thread without.
    ///
    /// # Safety
    /// `context` is null or a live context of this driver, and whoever relies on the thread's current one expects
    /// the change.
    ///
    /// # Errors
    /// 201 for what is no context.
    #[doc(alias = "cuCtxSetCurrent")]
    pub unsafe fn ctx_set_current(&self, context: CUcontext) -> Result<(), Error> {
        // SAFETY: the caller vouches for the context.
        let code = unsafe { self.calls()?.cuCtxSetCurrent(context) };
        self.check(Call::cuCtxSetCurrent, code)
    }

    /// `cuCtxPushCurrent`: makes `context` the calling thread's current one, on top of the one that was.
    ///
    /// # Safety
    /// `context` is a live context of this driver.
    ///
    /// # Errors
    /// 201 for what is no context.
    #[doc(alias = "cuCtxPushCurrent")]
    pub unsafe fn ctx_push_current(&self, context: CUcontext) -> Result<(), Error> {
        // SAFETY: the caller vouches for the context.
        let code = unsafe { self.calls()?.cuCtxPushCurrent(context) };
        self.check(Call::cuCtxPushCurrent, code)
    }

    /// `cuCtxPopCurrent`: takes the calling thread's current context off its stack and gives it.
    ///
    /// # Safety
    /// The caller pushed it: others rely on the context that they made current.
    ///
    /// # Errors
    /// 201 where the stack is empty.
    #[doc(alias = "cuCtxPopCurrent")]
    pub unsafe fn ctx_pop_current(&self) -> Result<CUcontext, Error> {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuCtxPopCurrent(&raw mut context) };
        self.check(Call::cuCtxPopCurrent, code)?;
        Ok(context)
    }

    /// `cuCtxGetDevice`: the device of the calling thread's current context.
    ///
    /// # Errors
    /// 201 where there is none.
    #[doc(alias = "cuCtxGetDevice")]
    pub fn ctx_get_device(&self) -> Result<CUdevice, Error> {
        let mut device = CUdevice::default();
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuCtxGetDevice(&raw mut device) };
        self.check(Call::cuCtxGetDevice, code)?;
        Ok(device)
    }

    /// `cuCtxSynchronize`: waits for all work of the current context. It breaks a capture in it, whatever the
    /// thread's capture mode.
    ///
    /// # Errors
    /// 900 while a stream of the context captures; the failure of earlier work.
    #[doc(alias = "cuCtxSynchronize")]
    pub fn ctx_synchronize(&self) -> Result<(), Error> {
        // SAFETY: the call takes nothing.
        let code = unsafe { self.calls()?.cuCtxSynchronize() };
        self.check(Call::cuCtxSynchronize, code)
    }
}

impl Device {
    /// `cuDevicePrimaryCtxRetain`: a reference to the device's primary context, which the first one makes. It
    /// doesn't become current.
    ///
    /// # Errors
    /// 2 without memory for it, 999 in a compute mode that forbids it.
    #[doc(alias = "cuDevicePrimaryCtxRetain")]
    pub fn primary_ctx_retain(&self) -> Result<CUcontext, Error> {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.driver().calls()?.cuDevicePrimaryCtxRetain(&raw mut context, self.raw()) };
        self.driver().check(Call::cuDevicePrimaryCtxRetain, code)?;
        Ok(context)
    }

    /// `cuDevicePrimaryCtxRelease`: gives one reference to the primary context back; the last one destroys it.
    ///
    /// # Safety
    /// The reference is the caller's, and where it is the last one nothing of the context is used any more.
    ///
    /// # Errors
    /// 201 where nobody holds a reference.
    #[doc(alias = "cuDevicePrimaryCtxRelease")]
    pub unsafe fn primary_ctx_release(&self) -> Result<(), Error> {
        // SAFETY: the caller owns the reference.
        let code = unsafe { self.driver().calls()?.cuDevicePrimaryCtxRelease(self.raw()) };
        self.driver().check(Call::cuDevicePrimaryCtxRelease, code)
    }

    /// `cuDevicePrimaryCtxGetState`: whether the primary context exists. Doesn't make it.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuDevicePrimaryCtxGetState")]
    pub fn primary_ctx_is_active(&self) -> Result<bool, Error> {
        let mut flags = 0;
        let mut active = 0;
        // SAFETY: both outputs are ours.
        let code =
            unsafe { self.driver().calls()?.cuDevicePrimaryCtxGetState(self.raw(), &raw mut flags, &raw mut active) };
        self.driver().check(Call::cuDevicePrimaryCtxGetState, code)?;
        Ok(active != 0)
    }

    /// `cuDevicePrimaryCtxReset`: destroys the primary context with its streams, events and ordinary memory,
    /// whoever holds references. Virtual memory stays.
    ///
    /// # Safety
    /// Nothing of the context is used any more, by anybody in the process.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuDevicePrimaryCtxReset")]
    pub unsafe fn primary_ctx_reset(&self) -> Result<(), Error> {
        // SAFETY: the caller knows the context to be out of use.
        let code = unsafe { self.driver().calls()?.cuDevicePrimaryCtxReset(self.raw()) };
        self.driver().check(Call::cuDevicePrimaryCtxReset, code)
    }
}
