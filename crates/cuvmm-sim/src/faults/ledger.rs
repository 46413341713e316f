//! [`Ledger`]: what successful calls left alive, on any driver.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuvmm_driver::{CUresult, Call, Failure, Hook, Invocation};

use crate::live::Live;

/// Counts what successful calls left alive, and all calls. Clones share the counts.
///
/// It sees results alone, not the driver: bytes are not counted, what an imported handle is released with is not
/// told from others, and what goes with a context that is reset stays counted: its streams, events and plain memory.
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
    calls: Vec<Call>,
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

    /// The calls that reached the driver, in order.
    pub fn calls(&self) -> Vec<Call> {
        self.lock().calls.clone()
    }

    /// How many calls of that name reached the driver.
    pub fn count(&self, call: Call) -> usize {
        self.lock().counts.get(&call).copied().unwrap_or(0)
    }

    /// Forgets the calls so far; what is alive stays counted.
    pub fn clear_calls(&self) {
        let mut book = self.lock();
        book.calls.clear();
        book.counts.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Hook for Ledger {
    fn after(&self, invocation: &Invocation<'_>, result: CUresult) -> Option<Failure> {
        let mut book = self.lock();
        book.calls.push(invocation.call);
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
                self.mappings.retain(|&start, &mut bytes| start < argument(0) || start.saturating_add(bytes) > end);
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
            Call::cuStreamEndCapture | Call::cuGraphCreate | Call::cuGraphInstantiateWithFlags => live.graphs += 1,
            Call::cuGraphDestroy | Call::cuGraphExecDestroy => less(&mut live.graphs),
            _ => {}
        }
    }
}

fn less(count: &mut usize) {
    *count = count.saturating_sub(1);
}
