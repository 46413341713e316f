//! [`Retained`]: the memory to which references were taken by its address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::process::process_id;
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
/// let reference = driver.retained().add(handle);
/// assert!(driver.retained().contains(handle));
/// drop(reference);
/// assert!(!driver.retained().contains(handle));
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Retained {
    references: Arc<References>,
}

/// The account of one reference, which ends when this is dropped: to be done once the driver has taken the reference back. As
/// long as it was not, or where that failed, somebody still has the memory; so there it is forgotten.
///
/// In a forked child the drop does nothing, and takes no lock.
///
/// ```
/// # use cuvmm_sim::{Machine, Simulator};
/// use cuvmm_driver::sys::CUmemGenericAllocationHandle;
///
/// let driver = Simulator::new(Machine::h200()).driver()?;
/// let handle = CUmemGenericAllocationHandle(7);
/// let [one, other] = [(); 2].map(|()| driver.retained().add(handle));
/// drop(one);
/// assert!(driver.retained().contains(handle), "the other one's");
/// std::mem::forget(other);
/// assert!(driver.retained().contains(handle), "for ever");
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the account ends when it is dropped"]
pub struct RetainedReference {
    references: Arc<References>,
    handle: CUmemGenericAllocationHandle,
}

#[derive(Debug)]
struct References {
    /// Whose they are.
    process: u32,
    /// How many there are, by the handle.
    handles: Mutex<BTreeMap<u64, usize>>,
}

impl Retained {
    /// Takes account of a reference until what this gives is dropped. Not in a forked child, nor does
    /// [`contains`](Self::contains) work there: they take a lock.
    pub fn add(&self, handle: CUmemGenericAllocationHandle) -> RetainedReference {
        *self.references.lock().entry(handle.0).or_default() += 1;
        RetainedReference { references: Arc::clone(&self.references), handle }
    }

    /// Whether there is any to the memory of that handle.
    pub fn contains(&self, handle: CUmemGenericAllocationHandle) -> bool {
        self.references.lock().contains_key(&handle.0)
    }
}

impl Drop for RetainedReference {
    fn drop(&mut self) {
        if process_id() != self.references.process {
            return;
        }
        let mut handles = self.references.lock();
        if let Some(references) = handles.get_mut(&self.handle.0) {
            *references -= 1;
            if *references == 0 {
                handles.remove(&self.handle.0);
            }
        }
    }
}

impl References {
    /// Held for a moment each time.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<u64, usize>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for References {
    fn default() -> Self {
        Self { process: process_id(), handles: Mutex::default() }
    }
}
