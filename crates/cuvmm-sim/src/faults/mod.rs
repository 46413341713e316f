//! Failures on demand or at random, a log of the calls, and counts of what is alive, in front of any driver.
//!
//! [`Faults`] and [`Ledger`] are hooks for [`cuvmm_driver::Hooked`], and work on a GPU as on the simulator. [`Both`]
//! chains two: put the [`Ledger`] behind the [`Faults`] to count what the driver did, or before them to count what the
//! caller was told.

mod ledger;
mod log;
mod plan;
mod random;

pub use ledger::Ledger;
pub use log::LoggedCall;
pub use plan::{Fault, Faults, When};
pub use random::Random;

pub(crate) use log::push_last;

use cuvmm_driver::{CUresult, Failure, Hook, Invocation};

/// Two hooks in a row: `outer` is next to the caller, `inner` to the driver.
///
/// ```
/// use cuvmm_driver::{Call, CUresult, Driver, Hooked};
/// use cuvmm_sim::faults::{Both, Faults, Ledger, When};
/// use cuvmm_sim::{Machine, Simulator};
///
/// let (faults, ledger) = (Faults::new(), Ledger::new());
/// let hook = Both { outer: faults.clone(), inner: ledger.clone() };
/// let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), hook))?;
/// faults.fail(Call::cuMemAddressReserve, 1, CUresult::OUT_OF_MEMORY, When::After);
/// assert!(driver.mem_address_reserve(2 << 20, 0, Default::default()).is_err());
/// assert_eq!(ledger.live().reservations, 1, "made, and lost");
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Both<O, I> {
    /// The one that sees a call first and its result last.
    pub outer: O,
    /// The one that sees a call last and its result first.
    pub inner: I,
}

impl<O: Hook, I: Hook> Hook for Both<O, I> {
    fn before(&self, invocation: &Invocation<'_>) -> Option<Failure> {
        self.outer.before(invocation).or_else(|| {
            let refused = self.inner.before(invocation)?;
            Some(self.outer.after(invocation, refused.code()).unwrap_or(refused))
        })
    }

    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        let inner = self.inner.after(invocation, result);
        let seen = inner.map_or(result, Failure::code);
        self.outer.after(invocation, seen).or(inner)
    }
}
