//! [`Ledger`]: what calls were made, and what the successful ones left alive, on any driver.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{CUresult, Call, Failure, Hook, Invocation};

use super::log::{Log, LoggedCall};
use crate::live::Live;

/// Counts what successful calls left alive, and logs all calls. Clones share the counts and the log.
///
/// It sees results alone, not the driver: bytes and user objects are not counted, what an imported handle is released
/// with is not told from others, and what goes with a context that is reset stays counted: its streams, events, modules
/// and plain memory.
///
/// ```
/// use cuvmm_driver::{Call, Driver, Hooked};
/// use cuvmm_sim::{Ledger, Machine, Simulator};
///
/// let ledger = Ledger::new();
/// let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), ledger.clone()))?;
/// driver.mem_address_reserve(2 << 20, 0, Default::default())?;
/// assert_eq!(ledger.live().reservations, 1);
/// assert_eq!(ledger.count(Call::cuMemAddressReserve), 1);
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Ledger {
    book: Arc<Mutex<Book>>,
}

#[derive(Debug, Default)]
struct Book {
    live: Live,
    mappings: BTreeMap<u64, u64>,
    log: Log,
    counts: BTreeMap<Call, usize>,
}

impl Ledger {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// What successful calls left alive.
    pub fn live(&self) -> Live {
        let book = self.lock();
        Live { mappings: book.mappings.len(), ..book.live.clone() }
    }

    /// The names of the calls that reached the driver, in the order in which they returned: the last 262,144 where
    /// there were more.
    pub fn calls(&self) -> Vec<Call> {
        self.lock().log.names()
    }

    /// The same calls with their arguments and results.
    pub fn log(&self) -> Vec<LoggedCall> {
        self.log_since(0)
    }

    /// How many calls there were since the start or the last [`clear_calls`](Self::clear_calls).
    pub fn total(&self) -> usize {
        self.lock().log.total()
    }

    /// The calls after the first `total`: what was made since [`total`](Self::total) said that.
    ///
    /// ```
    /// use cuvmm_driver::{Call, Driver, Hooked};
    /// use cuvmm_sim::{Ledger, Machine, Simulator};
    ///
    /// let ledger = Ledger::new();
    /// let driver = Driver::new(Hooked::new(Simulator::new(Machine::small()), ledger.clone()))?;
    /// let before = ledger.total();
    /// driver.mem_address_reserve(2 << 20, 0, Default::default())?;
    /// let made = ledger.log_since(before);
    /// assert_eq!(made.len(), 1);
    /// assert!(made[0].result.is_success());
    /// # Ok::<(), cuvmm_driver::Error>(())
    /// ```
    pub fn log_since(&self, total: usize) -> Vec<LoggedCall> {
        self.lock().log.since(total)
    }

    /// How many calls of that name reached the driver.
    pub fn count(&self, call: Call) -> usize {
        self.lock().counts.get(&call).copied().unwrap_or(0)
    }

    /// Forgets the calls so far; what is alive stays counted.
    pub fn clear_calls(&self) {
        let mut book = self.lock();
        book.log = Log::default();
        book.counts.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for Ledger {
    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        let mut book = self.lock();
        book.log.add(invocation, result);
        *book.counts.entry(invocation.call).or_default() += 1;
        if result.is_success() {
            book.enter(invocation);
        }
        None
    }
}

impl Book {
    fn enter(&mut self, invocation: &Invocation<'_>) {
        let argument = |index: usize| invocation.arguments.get(index).copied().unwrap_or(0);
        let live = &mut self.live;
        match invocation.call {
            Call::cuMemMap => drop(self.mappings.insert(argument(0), argument(1))),
            Call::cuMemUnmap => {
                let end = argument(0).saturating_add(argument(1));
                let inside = self.mappings.range(argument(0)..end);
                let inside = inside.filter(|&(&start, &bytes)| start.saturating_add(bytes) <= end);
                for start in inside.map(|(&start, _)| start).collect::<Vec<_>>() {
                    self.mappings.remove(&start);
                }
            }
            Call::cuMemAddressReserve => live.reservations += 1,
            Call::cuMemAddressFree => less(&mut live.reservations),
            Call::cuMemCreate | Call::cuMemImportFromShareableHandle | Call::cuMemRetainAllocationHandle => {
                live.allocations += 1;
            }
            Call::cuMemRelease => less(&mut live.allocations),
            Call::cuMemAlloc => live.plain_allocations += 1,
            Call::cuMemFree if argument(0) != 0 => less(&mut live.plain_allocations),
            Call::cuStreamCreate => live.streams += 1,
            Call::cuStreamDestroy => less(&mut live.streams),
            Call::cuEventCreate => live.events += 1,
            Call::cuEventDestroy => less(&mut live.events),
            Call::cuDevicePrimaryCtxRetain => live.contexts += 1,
            Call::cuDevicePrimaryCtxRelease => less(&mut live.contexts),
            Call::cuStreamEndCapture | Call::cuGraphCreate => live.graphs += 1,
            Call::cuGraphDestroy => less(&mut live.graphs),
            Call::cuGraphInstantiateWithFlags => live.executables += 1,
            Call::cuGraphExecDestroy => less(&mut live.executables),
            Call::cuModuleLoadData => live.modules += 1,
            Call::cuModuleUnload => less(&mut live.modules),
            _ => {}
        }
    }
}

fn less(count: &mut usize) {
    *count = count.saturating_sub(1);
}
