//! Work whose end a test decides, and bytes that say where they belong.
//!
//! # Safety
//! A gate's host function reads a flag that the gate keeps alive until the function has run.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use cuvmm::StreamRef;

/// Holds up a stream, by a host function that returns when the gate opens, or after 30 seconds.
pub struct Gate {
    open: Arc<(Mutex<bool>, Condvar)>,
}

impl Gate {
    /// Puts a gate into a stream: what is queued behind it waits.
    pub fn close(stream: &StreamRef) -> Self {
        let open = Arc::new((Mutex::new(false), Condvar::new()));
        let user_data = Arc::into_raw(Arc::clone(&open)).cast_mut().cast::<c_void>();
        // SAFETY: the function takes over the share that it is given.
        unsafe { stream.driver().launch_host_func(stream.as_raw(), Some(wait), user_data) }.expect("a host function");
        Self { open }
    }

    /// Lets the stream go on.
    pub fn open(&self) {
        *self.open.0.lock().unwrap() = true;
        self.open.1.notify_all();
    }

    /// Lets the stream go on after a while, and calls `meanwhile` at once.
    pub fn open_after<T>(&self, delay: Duration, meanwhile: impl FnOnce() -> T) -> T {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(delay);
                self.open();
            });
            meanwhile()
        })
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.open();
    }
}

unsafe extern "C" fn wait(user_data: *mut c_void) {
    // SAFETY: `Gate::close` made this share of the flag for this one call.
    let open = unsafe { Arc::from_raw(user_data.cast::<(Mutex<bool>, Condvar)>()) };
    let guard = open.0.lock().unwrap();
    drop(open.1.wait_timeout_while(guard, Duration::from_secs(30), |open| !*open).unwrap());
}

/// `length` bytes that depend on the seed and on where they are.
pub fn pattern(seed: u8, length: usize) -> Vec<u8> {
    (0..length).map(|index| (index as u64).wrapping_mul(0x9e37_79b9).to_le_bytes()[2] ^ seed).collect()
}
