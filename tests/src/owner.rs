//! [`Owner`]: a stream's owner whose end is noticed.
//!
//! # Safety
//! The owner has a share of the stream that it names.
#![allow(unsafe_code)]

use std::sync::Arc;

use cuvmm::driver::sys::CUstream;
use cuvmm::{Driver, StreamOwner, StreamRef};

/// The owner of a stream, which does something when it is dropped.
pub struct Owner {
    stream: StreamRef,
    at_end: Box<dyn Fn() + Send + Sync>,
}

impl Owner {
    /// Shares a stream by an owner of its own. Whoever lets go of the last share does `at_end`.
    pub fn share(stream: &StreamRef, at_end: impl Fn() + Send + Sync + 'static) -> StreamRef {
        let owner = Self { stream: stream.clone(), at_end: Box::new(at_end) };
        StreamRef::from_owner(Arc::new(owner)).expect("a shared stream")
    }
}

// SAFETY: the share of the stream goes with the value, and names the same stream all the while.
unsafe impl StreamOwner for Owner {
    fn driver(&self) -> &Driver {
        self.stream.driver()
    }

    fn stream(&self) -> CUstream {
        self.stream.as_raw()
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        (self.at_end)();
    }
}
