//! Events: marks in a stream that can be asked for and waited for.
//!
//! # Safety
//! Outputs are ours and read after success only; that handles are alive is the callers' promise.
#![allow(unsafe_code)]

use crate::driver::Driver;
use crate::error::Error;
use crate::raw::Call;
use crate::sys::*;

impl Driver {
    /// `cuEventCreate`: makes an event in the current context.
    ///
    /// # Errors
    /// 201 without a current context, 1 for flags that don't go together.
    #[doc(alias = "cuEventCreate")]
    pub fn event_create(&self, flags: CUevent_flags) -> Result<CUevent, Error> {
        let mut event = CUevent::NULL;
        // SAFETY: the output is ours.
        let code = unsafe { self.calls()?.cuEventCreate(&raw mut event, flags) };
        self.check(Call::cuEventCreate, code)?;
        Ok(event)
    }

    /// `cuEventRecord`: marks the work that `stream` has been given so far.
    ///
    /// # Safety
    /// `event` and `stream` are alive and of one context of this driver.
    ///
    /// # Errors
    /// 400 for handles of different contexts; the failure of earlier work.
    #[doc(alias = "cuEventRecord")]
    pub unsafe fn event_record(&self, event: CUevent, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller vouches for both.
        let code = unsafe { self.calls()?.cuEventRecord(event, stream) };
        self.check(Call::cuEventRecord, code)
    }

    /// `cuEventQuery`: whether the marked work is done; so is that of an event never recorded.
    ///
    /// # Safety
    /// `event` is alive and of this driver.
    ///
    /// # Errors
    /// 907 for an event recorded inside a capture, which this breaks; 900 while something captures and the
    /// thread's mode forbids the question, which breaks the capture; the failure of the work.
    #[doc(alias = "cuEventQuery")]
    pub unsafe fn event_query(&self, event: CUevent) -> Result<bool, Error> {
        // SAFETY: the caller vouches for the event.
        let code = unsafe { self.calls()?.cuEventQuery(event) };
        self.check_ready(Call::cuEventQuery, code)
    }

    /// `cuEventSynchronize`: waits for the marked work.
    ///
    /// # Safety
    /// `event` is alive and of this driver.
    ///
    /// # Errors
    /// As [`event_query`](Self::event_query).
    #[doc(alias = "cuEventSynchronize")]
    pub unsafe fn event_synchronize(&self, event: CUevent) -> Result<(), Error> {
        // SAFETY: the caller vouches for the event.
        let code = unsafe { self.calls()?.cuEventSynchronize(event) };
        self.check(Call::cuEventSynchronize, code)
    }

    /// `cuEventDestroy`: gives the event up, at once or when its work is done.
    ///
    /// # Safety
    /// `event` is the caller's, and nobody uses it any more.
    ///
    /// # Errors
    /// What the driver answers.
    #[doc(alias = "cuEventDestroy")]
    pub unsafe fn event_destroy(&self, event: CUevent) -> Result<(), Error> {
        // SAFETY: the caller owns the event.
        let code = unsafe { self.calls()?.cuEventDestroy(event) };
        self.check(Call::cuEventDestroy, code)
    }
}
