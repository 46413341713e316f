//! Counts of what cleaning up could not give back.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::driver::Driver;
use crate::error::Error;

/// What cleaning up could not give back, counted. Each was also reported once through `tracing`.
///
/// A stranded range is never freed or handed out again, and stranded memory stays allocated until the process
/// ends.
#[derive(Debug, Default)]
pub struct Stranded {
    reservations: AtomicUsize,
    allocations: AtomicUsize,
    mappings: AtomicUsize,
    buffers: AtomicUsize,
    others: AtomicUsize,
}

/// What was stranded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StrandedKind {
    /// An address range that was not freed.
    Reservation,
    /// A reference to physical memory that was not released.
    Allocation,
    /// A mapping that was not unmapped.
    Mapping,
    /// A buffer that could not be waited for, with all that it maps.
    Buffer,
    /// A stream, event or context reference that was not given back.
    Other,
}

impl Driver {
    /// Counts and reports what could not be given back, for the layer that owned it. Keeps quiet when the driver has
    /// shut down, where the end of the process gives back everything, and in a forked child, where it is the parent's.
    pub fn strand(&self, kind: StrandedKind, error: &Error, what: &str) {
        if !error.is_shut_down() && *error != Error::Forked {
            self.stranded().add(kind);
            tracing::error!(?kind, %error, "{what}");
        }
    }

    /// Whether a drop may make calls: not in a forked child, where nothing is to be given back, nor in a host function
    /// of the driver's, where `kept` is counted and reported.
    pub fn may_drop(&self, kept: &str) -> bool {
        if self.is_forked() {
            return false;
        }
        let forbidden = matches!(self.is_in_host_function(), Ok(true));
        if forbidden {
            self.stranded().add(StrandedKind::Other);
            tracing::error!("{kept}: it was dropped in a host function of the driver's");
        }
        !forbidden
    }
}

impl Stranded {
    /// Counts one. For the layers that own what they could not give back.
    pub fn add(&self, kind: StrandedKind) {
        self.counter(kind).fetch_add(1, Ordering::Relaxed);
    }

    /// How many of that kind.
    pub fn count(&self, kind: StrandedKind) -> usize {
        self.counter(kind).load(Ordering::Relaxed)
    }

    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        self.total() == 0
    }

    /// How many of every kind together.
    pub fn total(&self) -> usize {
        use StrandedKind::*;
        [Reservation, Allocation, Mapping, Buffer, Other].into_iter().map(|kind| self.count(kind)).sum()
    }

    fn counter(&self, kind: StrandedKind) -> &AtomicUsize {
        match kind {
            StrandedKind::Reservation => &self.reservations,
            StrandedKind::Allocation => &self.allocations,
            StrandedKind::Mapping => &self.mappings,
            StrandedKind::Buffer => &self.buffers,
            StrandedKind::Other => &self.others,
        }
    }
}
