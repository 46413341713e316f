//! What is alive, and what should not have been done.

use std::collections::BTreeMap;

use cuvmm_driver::Call;

/// Counts of what is alive. The default is nothing at all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Live {
    /// Reserved address ranges.
    pub reservations: usize,
    /// References to physical memory: handles made, imported or retained, and not yet released.
    pub allocations: usize,
    /// Those of them whose handle was imported.
    pub imported: usize,
    /// Mappings.
    pub mappings: usize,
    /// Bytes of physical memory by device, made here and held by anything, anywhere on this host. Devices without
    /// any are not listed.
    pub device_bytes: BTreeMap<i32, usize>,
    /// Bytes of host memory made by the virtual memory calls.
    pub host_bytes: usize,
    /// Allocations of cuMemAlloc.
    pub plain_allocations: usize,
    /// Streams that somebody made.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Times that primary contexts are retained.
    pub contexts: usize,
    /// Graphs.
    pub graphs: usize,
    /// Instantiated graphs.
    pub executables: usize,
    /// User objects that anybody refers to.
    pub user_objects: usize,
    /// Loaded modules.
    pub modules: usize,
}

impl Live {
    /// Whether nothing is alive.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Something that happened although its outcome is undefined by the documentation.
///
/// ```
/// use cuvmm_driver::{Call, sys::CUmemGenericAllocationHandle};
/// use cuvmm_sim::{Machine, Simulator};
///
/// let simulator = Simulator::new(Machine::h200());
/// let driver = simulator.driver()?;
/// // SAFETY: a real driver may crash on a handle that is none; a simulated one notes it.
/// assert!(unsafe { driver.mem_release(CUmemGenericAllocationHandle(7)) }.is_err());
/// assert_eq!(simulator.violations()[0].call, Call::cuMemRelease);
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The call that did it.
    pub call: Call,
    /// What it did.
    pub text: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.call, self.text)
    }
}
