//! [`Spin`]: kernels that run for as long as they are told.
//!
//! # Safety
//! The kernel is of a module that is unloaded when the value is dropped, which whoever queued one waits for; what it
//! writes is waited for before it goes: that is what the tests are about.
#![allow(unsafe_code)]

use std::time::Duration;

use cuvmm::driver::sys::{CUdeviceptr, CUfunction, CUmodule};
use cuvmm::{Device, StreamRef};
use cuvmm_sim::kernels::{PTX, SPIN};

use crate::work::{Current, queue};

/// A kernel that runs for a while, loaded on a device.
pub struct Spin {
    device: Device,
    module: CUmodule,
    function: CUfunction,
}

impl Spin {
    /// Loads it in the device's primary context, which it shares.
    pub fn load(device: &Device) -> Self {
        device.primary_ctx_retain().expect("a primary context");
        let _current = Current::push(device);
        let driver = device.driver();
        // SAFETY: a context is current, and the text ends with a zero.
        let module = unsafe { driver.module_load_data(PTX) }.expect("a module");
        // SAFETY: the module was loaded just now.
        let function = unsafe { driver.module_get_function(module, SPIN) }.expect("a kernel");
        Self { device: device.clone(), module, function }
    }

    /// Queues one that runs that long on a stream of the device's primary context, and adds to the word at the address all
    /// the while; to none where that is 0.
    pub fn queue(&self, stream: &StreamRef, address: CUdeviceptr, length: Duration) {
        let (mut address, mut nanoseconds) = (address.0, length.as_nanos() as u64);
        let mut parameters = [(&raw mut address).cast(), (&raw mut nanoseconds).cast()];
        queue(stream, || {
            // SAFETY: the function takes these two numbers; whoever has memory there waits for the stream before it goes.
            unsafe {
                self.device.driver().launch_kernel(self.function, [1; 3], [1; 3], 0, stream.as_raw(), &mut parameters)
            }
        });
    }
}

// SAFETY: a module and its functions may be used by any thread.
unsafe impl Send for Spin {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Spin {}

impl Drop for Spin {
    fn drop(&mut self) {
        let current = Current::push(&self.device);
        // SAFETY: it is ours, and what was queued of it is over.
        unsafe { self.device.driver().module_unload(self.module) }.expect("a module to unload");
        drop(current);
        // SAFETY: it was retained by `load`, once.
        unsafe { self.device.primary_ctx_release() }.expect("a primary context to release");
    }
}
