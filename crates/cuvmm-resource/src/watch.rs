//! What `tracing` is told of an operation: a span around it, and an event at its end.
//!
//! A subscriber is anybody's code, so no lock of ours is held here. Where nobody listens, nothing is measured and no
//! field is looked at.

use std::time::Instant;

use tracing::level_filters::LevelFilter;
use tracing::{Level, Span};

use crate::buffer::VirtualMemoryBuffer;
use crate::error::{CloseError, Error, ResizeError};

/// The target of each span and event.
pub(crate) const TARGET: &str = "cuvmm_resource";

/// What an operation came to: the buffer that there is now, and what went wrong.
pub(crate) trait Ended {
    fn buffer(&self) -> Option<&VirtualMemoryBuffer>;
    fn error(&self) -> Option<&Error>;
}

/// Does `work` in the span, and tells what it came to.
pub(crate) fn watch<T: Ended>(operation: &'static str, span: Span, work: impl FnOnce() -> T) -> T {
    if span.is_none() && LevelFilter::current() < Level::DEBUG {
        // Nobody listens, nor does `log`.
        return work();
    }
    // A subscriber may care for events alone.
    let is_heard = !span.is_disabled() || tracing::enabled!(target: TARGET, Level::DEBUG);
    let start = is_heard.then(Instant::now);
    let _entered = span.enter();
    let ended = work();
    if let Some(start) = start {
        let (buffer, elapsed) = (ended.buffer(), start.elapsed());
        tracing::debug!(
            target: TARGET,
            address = buffer.map(|buffer| display(buffer.address())),
            size = buffer.map(VirtualMemoryBuffer::size),
            capacity = buffer.map(VirtualMemoryBuffer::capacity),
            chunks = buffer.map(|buffer| buffer.range().count()),
            outcome = buffer.and_then(VirtualMemoryBuffer::outcome).map(debug),
            error = ended.error().map(display),
            elapsed_ns = u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX),
            "{operation}"
        );
    }
    ended
}

impl Ended for Result<VirtualMemoryBuffer, Error> {
    fn buffer(&self) -> Option<&VirtualMemoryBuffer> {
        self.as_ref().ok()
    }

    fn error(&self) -> Option<&Error> {
        self.as_ref().err()
    }
}

impl Ended for Result<VirtualMemoryBuffer, ResizeError> {
    fn buffer(&self) -> Option<&VirtualMemoryBuffer> {
        match self {
            Ok(buffer) => Some(buffer),
            Err(error) => Some(&*error.buffer).filter(|_| error.resized),
        }
    }

    fn error(&self) -> Option<&Error> {
        self.as_ref().err().map(ResizeError::error)
    }
}

impl Ended for Result<usize, Error> {
    fn buffer(&self) -> Option<&VirtualMemoryBuffer> {
        None
    }

    fn error(&self) -> Option<&Error> {
        self.as_ref().err()
    }
}

impl Ended for Result<(), CloseError> {
    fn buffer(&self) -> Option<&VirtualMemoryBuffer> {
        None
    }

    fn error(&self) -> Option<&Error> {
        self.as_ref().err().map(CloseError::error)
    }
}

impl Ended for Result<(), Error> {
    fn buffer(&self) -> Option<&VirtualMemoryBuffer> {
        None
    }

    fn error(&self) -> Option<&Error> {
        self.as_ref().err()
    }
}
