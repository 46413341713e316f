//! [`Retained`]: the memory to which references were taken by its address.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sys::CUmemGenericAllocationHandle;

/// The memory to which references were taken by its address and are kept, over all that was made through a driver.
///
/// A driver gives the handle that the memory was mapped by, and counts its references without telling how many there are.
/// So whoever owns such a reference keeps account of it here, for those who made the memory and want to know whether they
/// alone have it. No driver call is made, and what is retained past this is not known.
///
/// ```
/// # use cuvmm_sim::{Machine, Simulator};
/// use cuvmm_driver::sys::CUmemGenericAllocationHandle;
///
/// let driver = Simulator::new(Machine::h200()).driver()?;
/// let handle = CUmemGenericAllocationHandle(7);
/// driver.retained().add(handle);
/// assert!(driver.retained().contains(handle));
/// driver.retained().remove(handle);
/// assert!(!driver.retained().contains(handle));
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Retained {
    /// How many references there are, by the handle.
    handles: Mutex<BTreeMap<u64, usize>>,
}

impl Retained {
    /// Takes account of a reference. Not in a forked child, nor do the others: they take a lock.
    pub fn add(&self, handle: CUmemGenericAllocationHandle) {
        *self.lock().entry(handle.0).or_default() += 1;
    }

    /// Takes account of the end of one.
    pub fn remove(&self, handle: CUmemGenericAllocationHandle) {
        let mut handles = self.lock();
        if let Some(references) = handles.get_mut(&handle.0) {
            *references -= 1;
            if *references == 0 {
                handles.remove(&handle.0);
            }
        }
    }

    /// Whether there is any to the memory of that handle.
    pub fn contains(&self, handle: CUmemGenericAllocationHandle) -> bool {
        self.lock().contains_key(&handle.0)
    }

    /// Held for a moment each time.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, usize>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
