//! [`Simulator`]: a driver with a machine of its own, and what tests may ask of it beside the calls.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, Driver, Error, process_id};

use crate::latency;
use crate::live::{Live, Violation};
use crate::machine::Machine;
use crate::resolve::EntryPoint;
use crate::session::{Answer, Session};
use crate::state::{Home, State};
use crate::stream::Kind;
use crate::thread::{self, Callback};
use crate::user_object::Destructors;

/// A simulated CUDA driver: not a GPU, and never a fallback for one.
///
/// Clones are the same driver. Others have a state of their own, so that many can exist in one process. When the
/// last clone goes (a [`Driver`] holds one), everything that is left in it goes with it.
///
/// ```
/// use cuvmm_sim::{Machine, Simulator};
///
/// let simulator = Simulator::new(Machine::h200());
/// let driver = simulator.driver()?;
/// let address = driver.mem_address_reserve(2 << 20, 0, Default::default())?;
/// assert_eq!(simulator.live().reservations, 1);
/// // SAFETY: it was reserved just now, and nothing is in it.
/// unsafe { driver.mem_address_free(address, 2 << 20)? };
/// assert!(simulator.live().is_empty());
/// # Ok::<(), cuvmm_driver::Error>(())
/// ```
#[derive(Clone)]
pub struct Simulator {
    handle: Arc<Handle>,
}

/// What ends the simulated driver when nobody has it any more.
struct Handle {
    shared: Arc<Shared>,
}

/// What the calls and the streams' threads share.
pub(crate) struct Shared {
    pub(crate) machine: Machine,
    /// The destructors that are due.
    pub(crate) destructors: Arc<Destructors>,
    /// Something changed that somebody may be waiting for.
    pub(crate) changed: Condvar,
    state: Mutex<State>,
    /// The process that called cuInit; 0 before.
    process: AtomicU32,
    /// Where the calls' C entry points are, if anything serves this driver to C.
    pub(crate) entry_points: OnceLock<EntryPoint>,
}

impl Shared {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes whose driver it is from now on: of the process that was the first.
    pub(crate) fn mark_initialized(&self) {
        let _ = self.process.compare_exchange(0, process_id(), Ordering::AcqRel, Ordering::Acquire);
    }

    pub(crate) fn device_has(&self, ordinal: i32, attribute: CUdevice_attribute) -> bool {
        let value = self.machine.device(ordinal).and_then(|device| self.machine.attribute(device, attribute.0));
        value.is_some_and(|value| value != 0)
    }

    pub(crate) fn any_device_has(&self, attribute: CUdevice_attribute) -> bool {
        (0..self.machine.devices.len()).any(|ordinal| self.device_has(ordinal as i32, attribute))
    }

    /// Whether this process was forked from the one that called cuInit. Asked before any lock is touched, as
    /// another thread may have held it when the process forked.
    pub(crate) fn is_forked(&self) -> bool {
        !matches!(self.process.load(Ordering::Acquire), 0) && !self.is_ours()
    }

    fn is_ours(&self) -> bool {
        self.process.load(Ordering::Acquire) == process_id()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.shared.is_forked() {
            // Nothing is to be done in a forked child, not even when its last share goes: a thread that the child does
            // not have may hold the locks, and the kernel keeps its own account of what a child shares.
            return std::mem::forget(self.shared.clone());
        }
        self.shared.destructors.close();
        self.shared.lock().clear();
        self.shared.changed.notify_all();
    }
}

impl Simulator {
    /// A driver of `machine` that nobody has started yet.
    pub fn new(machine: Machine) -> Self {
        let state = Mutex::new(State::new(machine.preset.policy(), machine.latency));
        let shared = Shared {
            machine,
            destructors: Arc::default(),
            changed: Condvar::new(),
            state,
            process: AtomicU32::new(0),
            entry_points: OnceLock::new(),
        };
        Self { handle: Arc::new(Handle { shared: Arc::new(shared) }) }
    }

    /// Starts it, for typed calls.
    ///
    /// # Errors
    /// 100 for a machine without devices; 4 after [`shut_down`](Self::shut_down).
    pub fn driver(&self) -> Result<Driver, Error> {
        Driver::new(self.clone())
    }

    /// The machine.
    pub fn machine(&self) -> &Machine {
        &self.shared().machine
    }

    /// What is alive, at this moment: see [`wait_released`](Self::wait_released) where another process ended.
    pub fn live(&self) -> Live {
        let mut state = self.shared().lock();
        let devices = 0..self.machine().devices.len() as i32;
        let device_bytes = devices
            .map(|ordinal| (ordinal, state.used_by(Home::Device(ordinal))))
            .filter(|&(_, bytes)| bytes > 0)
            .collect();
        let on_host = |home: &Home| matches!(home, Home::Node(_));
        let mappings = |plain: bool| state.mappings.values().filter(|found| found.handle.is_none() == plain).count();
        Live {
            reservations: state.reservations.values().filter(|found| !found.plain).count(),
            allocations: state.handles.values().map(|handle| handle.references).sum(),
            imported: state.handles.values().filter(|handle| handle.imported && handle.references > 0).count(),
            mappings: mappings(false),
            device_bytes,
            host_bytes: state.used.iter().filter(|(home, _)| on_host(home)).map(|(_, bytes)| bytes).sum(),
            plain_allocations: mappings(true),
            streams: state.streams.values().filter(|found| found.kind == Kind::Made && !found.destroyed).count(),
            events: state.events.len(),
            contexts: state.primaries.values().map(|primary| primary.retains).sum(),
            graphs: state.graphs.values().filter(|graph| !graph.capturing).count(),
            executables: state.executables.len(),
            user_objects: state.user_objects.values().filter(|object| object.is_alive()).count(),
            modules: state.modules.len(),
        }
    }

    /// What happened although its outcome is undefined by the documentation, in order: the last 262,144 where there
    /// was more.
    pub fn violations(&self) -> Vec<Violation> {
        self.shared().lock().violations.iter().cloned().collect()
    }

    /// Forgets the violations so far.
    pub fn clear_violations(&self) {
        self.shared().lock().violations.clear();
    }

    /// The calls made since the start or the last [`clear_calls`](Self::clear_calls), in order: the last 262,144
    /// where there were more. Calls before cuInit, after [`shut_down`](Self::shut_down) or in a forked process are
    /// not among them, nor are those of the driver's version, of the names and texts of codes and of entry points. A
    /// [`Ledger`](crate::Ledger) in front of it has their arguments and results too.
    pub fn calls(&self) -> Vec<Call> {
        self.shared().lock().calls.iter().copied().collect()
    }

    /// Forgets the calls so far.
    pub fn clear_calls(&self) {
        self.shared().lock().calls.clear();
    }

    /// Whether a virtual memory call mapped something at `address`.
    pub fn is_mapped(&self, address: CUdeviceptr) -> bool {
        self.shared().lock().virtual_mapping_at(address.0).is_some()
    }

    /// The bytes of physical memory of a device that were made here and that anything, anywhere on this host, holds
    /// at this moment: see [`wait_released`](Self::wait_released) where another process ended.
    pub fn physical_bytes(&self, ordinal: i32) -> usize {
        self.shared().lock().used_by(Home::Device(ordinal))
    }

    /// Waits until no memory that was made here is held by descriptors or other processes alone; whether that came
    /// before the deadline.
    ///
    /// For after another process closed what it shared, or ended. It is also of use where this process merely starts
    /// others: a child has copies of all descriptors until it executes its program, whatever they are marked with.
    #[must_use]
    pub fn wait_released(&self, deadline: Instant) -> bool {
        while self.shared().lock().is_held() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    /// The bytes at a device address, whoever is granted what; none unless all of it is mapped. No call is made.
    pub fn peek(&self, address: CUdeviceptr, bytes: usize) -> Option<Vec<u8>> {
        let state = self.shared().lock();
        let end = address.checked_add(bytes)?.0;
        let mut pieces = Vec::new();
        let mut at = address.0;
        while at < end {
            let (start, mapping) = state.mapping_at(at)?;
            let until = end.min(start + mapping.bytes);
            pieces.push((&mapping.memory, (at - start) as usize, (until - at) as usize));
            at = until;
        }
        let mut seen = Vec::new();
        seen.try_reserve_exact(bytes).ok()?;
        for (memory, offset, length) in pieces {
            seen.extend(memory.bytes_at(offset, length));
        }
        Some(seen)
    }

    /// Lets devices whose contexts broke have new ones, once those are reset or released: as for a process that is
    /// started anew, since a real driver gives this one no other.
    pub fn mend_devices(&self) {
        self.shared().lock().mend_devices();
    }

    /// Makes every later call answer 4, as a driver does while its process ends: all but those of the driver's
    /// version, of the names and texts of codes and of entry points, which no state of the driver touches.
    pub fn shut_down(&self) {
        self.shared().lock().shut_down = true;
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.handle.shared
    }

    /// Whether the driver's version has the call.
    pub(crate) fn has(&self, call: Call) -> bool {
        call.symbol().version <= self.machine().driver_version
    }

    pub(crate) fn is_served(&self) -> bool {
        self.shared().entry_points.get().is_some()
    }

    /// Makes a call: refuses what no call may be made in, and else does its work under the lock.
    pub(crate) fn answer(&self, call: Call, work: impl FnOnce(&mut Session<'_>) -> Answer) -> CUresult {
        let answer = self.enter(call).and_then(|mut session| {
            let answer = work(&mut session);
            let end = session.end();
            drop(session);
            end.into_iter().for_each(latency::wait_until);
            answer
        });
        answer.err().unwrap_or(CUresult::SUCCESS)
    }

    fn enter(&self, call: Call) -> Answer<Session<'_>> {
        let shared = self.shared();
        if !self.has(call) {
            return Err(CUresult::NOT_SUPPORTED);
        }
        if shared.is_forked() || (call != Call::cuInit && !shared.is_ours()) {
            return Err(CUresult::NOT_INITIALIZED);
        }
        let mut session = Session::new(shared, call, shared.lock());
        if session.shut_down {
            return Err(CUresult::DEINITIALIZED);
        }
        session.log(call);
        let thread = session.thread;
        thread::meet(shared, &mut session, thread);
        let running = session.threads.get(&thread).and_then(|thread| thread.running.last());
        if let Some(callback) = running.map(|running| running.callback) {
            session.violation(match callback {
                Callback::HostFunction(_) => "a call in a host function",
                Callback::Destructor => "a call in the destructor of a user object",
            });
            if !is_tolerated_in_host_function(call) {
                return Err(CUresult::NOT_PERMITTED);
            }
        }
        Ok(session)
    }
}

/// The calls that a real driver lets through in a host function or destructor, though none may be made there: those on
/// streams and events that the caller has, sets, launches of graphs, and those on user objects.
fn is_tolerated_in_host_function(call: Call) -> bool {
    matches!(
        call,
        Call::cuStreamIsCapturing
            | Call::cuThreadExchangeStreamCaptureMode
            | Call::cuStreamBeginCapture
            | Call::cuStreamEndCapture
            | Call::cuStreamGetCaptureInfo
            | Call::cuStreamGetCtx
            | Call::cuStreamGetDevice
            | Call::cuStreamQuery
            | Call::cuStreamSynchronize
            | Call::cuStreamWaitEvent
            | Call::cuStreamDestroy
            | Call::cuEventRecord
            | Call::cuEventQuery
            | Call::cuEventSynchronize
            | Call::cuEventDestroy
            | Call::cuLaunchHostFunc
            | Call::cuMemsetD8Async
            | Call::cuMemsetD16Async
            | Call::cuMemsetD32Async
            | Call::cuGraphLaunch
            | Call::cuGraphAddHostNode
            | Call::cuGraphRetainUserObject
            | Call::cuGraphReleaseUserObject
            | Call::cuUserObjectCreate
            | Call::cuUserObjectRetain
            | Call::cuUserObjectRelease
    )
}

impl std::fmt::Debug for Simulator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Simulator").field("machine", self.machine()).finish_non_exhaustive()
    }
}
