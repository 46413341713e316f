//! The driver of the models: it keeps account of addresses, memory and mappings, and notes what breaks a rule.
//!
//! # Safety
//! It hands out addresses that nobody ever reads or writes through.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr;

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, RawDriver};
use shuttle::sync::Mutex;
use shuttle::thread::{self, ThreadId};

/// The granularity of its memory: that of the reservations that a resource makes, so that none has room to spare.
pub(crate) const G: usize = 32 << 20;

/// What it refuses, and with which code.
pub(crate) const REFUSAL: CUresult = CUresult::UNKNOWN;

#[derive(Default)]
pub(crate) struct Checking {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many addresses and handles were given.
    given: u64,
    /// Reservations: address to size.
    reserved: BTreeMap<u64, usize>,
    /// Memory that was not released: handle to size.
    memory: BTreeMap<u64, usize>,
    /// How many bytes of it there can be; any number unless it is said.
    most: Option<usize>,
    /// Mappings: address to size.
    mapped: BTreeMap<u64, usize>,
    violations: Vec<String>,
    /// Whether work is on all that is mapped.
    is_working: bool,
    /// Breaks it: events are over before the work that they were recorded behind.
    is_hasty: bool,
    /// Events that were not destroyed.
    events: BTreeMap<u64, Recorded>,
    /// The call to refuse, and how many of its kind before it.
    refused: Option<(Call, usize)>,
    /// Unmaps that are still to take effect, and whose they are; none: they do at once.
    late: Option<Vec<(ThreadId, u64)>>,
}

/// Whether an event was recorded.
type Recorded = bool;

/// What is left of everything: reservations, memory and mappings.
pub(crate) type Left = [usize; 3];

impl Checking {
    /// Refuses the one such call that comes after `before` others.
    pub(crate) fn refuse(&self, call: Call, before: usize) {
        self.state.lock().unwrap().refused = Some((call, before));
    }

    /// From now on there can be so many bytes of memory.
    pub(crate) fn limit(&self, bytes: usize) {
        self.state.lock().unwrap().most = Some(bytes);
    }

    /// Breaks it: what it says is unmapped stays mapped until the thread's next call.
    pub(crate) fn unmap_late(&self) {
        self.state.lock().unwrap().late = Some(Vec::new());
    }

    /// Work begins on all that is mapped.
    pub(crate) fn begin_work(&self) {
        self.state.lock().unwrap().is_working = true;
    }

    /// That work is over.
    pub(crate) fn end_work(&self) {
        self.state.lock().unwrap().is_working = false;
    }

    pub(crate) fn hurry(&self) {
        self.state.lock().unwrap().is_hasty = true;
    }

    /// Events that were not destroyed.
    pub(crate) fn events(&self) -> usize {
        self.state.lock().unwrap().events.len()
    }

    /// What is left, once no rule was broken.
    #[track_caller]
    pub(crate) fn left(&self) -> Left {
        let state = self.state.lock().unwrap();
        assert!(state.violations.is_empty(), "{}", state.violations.join("; "));
        [state.reserved.len(), state.memory.len(), state.mapped.len()]
    }

    /// One call. The scheduler is asked before it, by the lock.
    fn call(&self, call: Call, effect: impl FnOnce(&mut State) -> Result<(), String>) -> CUresult {
        let mut state = self.state.lock().unwrap();
        if let Some((_, before)) = state.refused.as_mut().filter(|(refused, _)| *refused == call) {
            if *before == 0 {
                state.refused = None;
                return REFUSAL;
            }
            *before -= 1;
        }
        let here = thread::current().id();
        let due = state.late.iter_mut().flat_map(|late| late.extract_if(.., |(thread, _)| *thread == here));
        for (_, address) in due.collect::<Vec<_>>() {
            state.mapped.remove(&address);
        }
        if let Err(violation) = effect(&mut state) {
            state.violations.push(format!("{call}: {violation}"));
        }
        CUresult::SUCCESS
    }
}

/// Whether something in `ranges` shares an address with the range given.
fn is_any_in(ranges: &BTreeMap<u64, usize>, address: u64, size: usize) -> bool {
    let before = ranges.range(..address + size as u64).next_back();
    before.is_some_and(|(start, length)| start + *length as u64 > address)
}

fn require(is_so: bool, otherwise: &str) -> Result<(), String> {
    if is_so { Ok(()) } else { Err(otherwise.to_owned()) }
}

// SAFETY: each output is written, and an address is given once; what it names is never used.
unsafe impl RawDriver for Checking {
    unsafe fn cuInit(&self, _: u32) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuDriverGetVersion(&self, version: *mut i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { version.write(13000) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGetCount(&self, count: *mut i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { count.write(1) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGet(&self, device: *mut CUdevice, ordinal: i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { device.write(CUdevice(ordinal)) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGetAttribute(&self, value: *mut i32, _: CUdevice_attribute, _: CUdevice) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { value.write(1) };
        CUresult::SUCCESS
    }

    unsafe fn cuCtxGetCurrent(&self, context: *mut CUcontext) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { context.write(CUcontext::NULL) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemGetAllocationGranularity(
        &self,
        granularity: *mut usize,
        _: *const CUmemAllocationProp,
        _: CUmemAllocationGranularity_flags,
    ) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { granularity.write(G) };
        CUresult::SUCCESS
    }

    unsafe fn cuMemAddressReserve(
        &self,
        address: *mut CUdeviceptr,
        size: usize,
        _: usize,
        hint: CUdeviceptr,
        _: u64,
    ) -> CUresult {
        self.call(Call::cuMemAddressReserve, |state| {
            state.given += 1;
            let is_granted = hint.0 != 0 && !is_any_in(&state.reserved, hint.0, size);
            let start = if is_granted { hint.0 } else { state.given << 40 };
            state.reserved.insert(start, size);
            // SAFETY: the caller's output.
            unsafe { address.write(CUdeviceptr(start)) };
            Ok(())
        })
    }

    unsafe fn cuMemAddressFree(&self, address: CUdeviceptr, size: usize) -> CUresult {
        self.call(Call::cuMemAddressFree, |state| {
            require(state.reserved.remove(&address.0) == Some(size), "no reservation, or one freed before")?;
            require(!is_any_in(&state.mapped, address.0, size), "something is mapped there")
        })
    }

    unsafe fn cuMemCreate(
        &self,
        handle: *mut CUmemGenericAllocationHandle,
        size: usize,
        _: *const CUmemAllocationProp,
        _: u64,
    ) -> CUresult {
        let mut is_short = false;
        let created = self.call(Call::cuMemCreate, |state| {
            let needed = state.memory.values().sum::<usize>() + size;
            is_short = state.most.is_some_and(|most| needed > most);
            if !is_short {
                state.given += 1;
                state.memory.insert(state.given, size);
                // SAFETY: the caller's output.
                unsafe { handle.write(CUmemGenericAllocationHandle(state.given)) };
            }
            Ok(())
        });
        if is_short { CUresult::OUT_OF_MEMORY } else { created }
    }

    unsafe fn cuMemRelease(&self, handle: CUmemGenericAllocationHandle) -> CUresult {
        self.call(Call::cuMemRelease, |state| {
            require(state.memory.remove(&handle.0).is_some(), "no memory, or released before")
        })
    }

    unsafe fn cuMemMap(
        &self,
        address: CUdeviceptr,
        size: usize,
        _: usize,
        handle: CUmemGenericAllocationHandle,
        _: u64,
    ) -> CUresult {
        self.call(Call::cuMemMap, |state| {
            let overlaps = is_any_in(&state.mapped, address.0, size);
            state.mapped.insert(address.0, size);
            require(!overlaps, "two mappings overlap")?;
            require(state.memory.get(&handle.0) == Some(&size), "no such memory, or released before")?;
            let reservation = state.reserved.range(..=address.0).next_back();
            let ends_in = |(start, length): (&u64, &usize)| address.0 + size as u64 <= start + *length as u64;
            require(reservation.is_some_and(ends_in), "the addresses are not reserved")
        })
    }

    unsafe fn cuMemUnmap(&self, address: CUdeviceptr, size: usize) -> CUresult {
        self.call(Call::cuMemUnmap, |state| {
            let is_mapping = state.mapped.get(&address.0) == Some(&size);
            match &mut state.late {
                Some(late) => late.push((thread::current().id(), address.0)),
                None => drop(state.mapped.remove(&address.0)),
            }
            require(is_mapping, "no mapping, or unmapped before")?;
            require(!state.is_working, "unmapped under work")
        })
    }

    unsafe fn cuStreamGetCtx(&self, _: CUstream, context: *mut CUcontext) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { context.write(CUcontext(ptr::dangling_mut())) };
        CUresult::SUCCESS
    }

    unsafe fn cuCtxPushCurrent(&self, _: CUcontext) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuCtxPopCurrent(&self, context: *mut CUcontext) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { context.write(CUcontext(ptr::dangling_mut())) };
        CUresult::SUCCESS
    }

    unsafe fn cuThreadExchangeStreamCaptureMode(&self, _: *mut CUstreamCaptureMode) -> CUresult {
        CUresult::SUCCESS
    }

    unsafe fn cuStreamIsCapturing(&self, _: CUstream, status: *mut CUstreamCaptureStatus) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { status.write(CUstreamCaptureStatus::NONE) };
        CUresult::SUCCESS
    }

    unsafe fn cuEventCreate(&self, event: *mut CUevent, _: CUevent_flags) -> CUresult {
        self.call(Call::cuEventCreate, |state| {
            state.given += 1;
            state.events.insert(state.given, false);
            // SAFETY: the caller's output.
            unsafe { event.write(CUevent(ptr::without_provenance_mut(state.given as usize))) };
            Ok(())
        })
    }

    unsafe fn cuEventRecord(&self, event: CUevent, _: CUstream) -> CUresult {
        self.call(Call::cuEventRecord, |state| {
            let recorded = state.events.get_mut(&(event.0.addr() as u64)).ok_or("no event, or destroyed before")?;
            *recorded = true;
            Ok(())
        })
    }

    unsafe fn cuEventQuery(&self, event: CUevent) -> CUresult {
        let mut is_over = true;
        let asked = self.call(Call::cuEventQuery, |state| {
            is_over = !state.is_working || state.is_hasty;
            require(state.events.get(&(event.0.addr() as u64)) == Some(&true), "no event, or never recorded")
        });
        if is_over { asked } else { CUresult::NOT_READY }
    }

    unsafe fn cuEventDestroy(&self, event: CUevent) -> CUresult {
        self.call(Call::cuEventDestroy, |state| {
            require(state.events.remove(&(event.0.addr() as u64)).is_some(), "no event, or destroyed before")
        })
    }

    unsafe fn cuMemSetAccess(
        &self,
        address: CUdeviceptr,
        size: usize,
        _: *const CUmemAccessDesc,
        _: usize,
    ) -> CUresult {
        self.call(Call::cuMemSetAccess, |state| {
            require(state.mapped.get(&address.0) == Some(&size), "no mapping, or unmapped before")
        })
    }
}
