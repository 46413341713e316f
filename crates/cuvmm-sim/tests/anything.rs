//! Any sequence of calls with any numbers: each gets an answer, nothing of the process is harmed, and nothing is left
//! when the driver is dropped. There is one test here, so that what the process has is what the test has.

#![allow(clippy::unwrap_used, reason = "tests")]
#![allow(clippy::multiple_unsafe_ops_per_block, reason = "tests: the block makes one call of many")]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use cuvmm_driver::sys::*;
use cuvmm_driver::{Driver, RawDriver};
use cuvmm_sim::{Machine, Preset, Simulator};

const CHUNK: u64 = 64 << 10;
const CALLS: usize = 20_000;

/// Numbers that look random, and are the same in every run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// One of what was seen before, something near it, or nonsense.
    fn like(&mut self, seen: &[u64]) -> u64 {
        // What is old is mostly dead.
        let recent = if self.below(4) == 0 { seen } else { &seen[seen.len().saturating_sub(6)..] };
        let known = if recent.is_empty() { 0 } else { recent[self.below(recent.len() as u64) as usize] };
        match self.below(16) {
            0 => self.next(),
            1 => 0,
            2 => known.wrapping_add(CHUNK * self.below(4)),
            3 => known.wrapping_add(self.below(4096)),
            _ => known,
        }
    }

    fn size(&mut self) -> usize {
        match self.below(12) {
            0 => self.next() as usize,
            1 => 0,
            2 => self.below(100_000) as usize,
            _ => (CHUNK * (1 + self.below(4))) as usize,
        }
    }
}

#[derive(Default)]
struct Seen {
    addresses: Vec<u64>,
    handles: Vec<u64>,
    streams: Vec<u64>,
    events: Vec<u64>,
    graphs: Vec<u64>,
    executables: Vec<u64>,
    exported: Vec<OwnedFd>,
}

fn opaque<T>(number: u64) -> *mut T {
    std::ptr::without_provenance_mut(number as usize)
}

/// Makes one call; host pointers are valid or null, and all else is any number.
fn call(raw: &dyn RawDriver, numbers: &mut Numbers, seen: &mut Seen) {
    let (size, other) = (numbers.size(), numbers.size());
    let address = CUdeviceptr(numbers.like(&seen.addresses));
    let handle = CUmemGenericAllocationHandle(numbers.like(&seen.handles));
    let stream = CUstream(opaque(numbers.like(&seen.streams)));
    let event = CUevent(opaque(numbers.like(&seen.events)));
    let location =
        CUmemLocation { location_type: CUmemLocationType(numbers.below(4) as u32), id: numbers.below(3) as i32 - 1 };
    let mut buffer = [0_u8; 4096];
    let short = size.min(4096);
    let is_device = |address: CUdeviceptr| seen.addresses.iter().any(|&known| address.0.wrapping_sub(known) < 1 << 20);
    // SAFETY: pointers are locals' or null, host lengths within them. Addresses that are used as sources or
    // destinations are the simulator's or null, as any other would be taken for the host's.
    unsafe {
        match numbers.below(24) {
            0 | 1 => {
                let mut out = CUdeviceptr(0);
                let alignment = if numbers.below(4) == 0 { numbers.next() as usize } else { 0 };
                let hint = if numbers.below(2) == 0 { CUdeviceptr(0) } else { address };
                if raw.cuMemAddressReserve(&raw mut out, size, alignment, hint, 0).is_success() {
                    seen.addresses.push(out.0);
                }
            }
            2 => _ = raw.cuMemAddressFree(address, size),
            3 | 4 => {
                let mut out = CUmemGenericAllocationHandle(0);
                let kinds = CUmemAllocationHandleType(numbers.below(4) as u32 & 1);
                let properties = CUmemAllocationProp::pinned(location, kinds);
                if raw.cuMemCreate(&raw mut out, size, &raw const properties, 0).is_success() {
                    seen.handles.push(out.0);
                }
            }
            5 => _ = raw.cuMemRelease(handle),
            6 | 7 => _ = raw.cuMemMap(address, size, if numbers.below(9) == 0 { other } else { 0 }, handle, 0),
            8 => _ = raw.cuMemUnmap(address, size),
            9 | 10 => {
                let grants = [CUmemAccessDesc { location, flags: CUmemAccess_flags(numbers.below(5) as u32) }; 2];
                _ = raw.cuMemSetAccess(address, size, grants.as_ptr(), numbers.below(3) as usize);
            }
            11 if is_device(address) || address.0 == 0 => {
                _ = raw.cuMemcpyHtoDAsync(address, HOST.as_ptr().cast(), short, stream);
            }
            12 if is_device(address) || address.0 == 0 => {
                _ = raw.cuMemcpyDtoH(buffer.as_mut_ptr().cast(), address, short);
            }
            13 => _ = raw.cuMemsetD8Async(address, 1, size, stream),
            14 => {
                let mut out = CUstream::NULL;
                if raw.cuStreamCreate(&raw mut out, CUstream_flags(numbers.below(3) as u32)).is_success() {
                    seen.streams.push(out.0.addr() as u64);
                }
                if numbers.below(3) == 0 {
                    _ = raw.cuStreamDestroy(stream);
                }
            }
            15 => {
                let mut out = CUmemGenericAllocationHandle(0);
                let at = std::ptr::without_provenance_mut(address.0 as usize);
                if raw.cuMemRetainAllocationHandle(&raw mut out, at).is_success() {
                    _ = raw.cuMemRelease(out);
                }
            }
            16 => {
                let mut number = -1_i32;
                let kind = CUmemAllocationHandleType(numbers.below(3) as u32);
                if raw.cuMemExportToShareableHandle((&raw mut number).cast(), handle, kind, 0).is_success() {
                    // Only so many stay open.
                    seen.exported.truncate(15);
                    seen.exported.push(OwnedFd::from_raw_fd(number));
                }
            }
            17 => {
                let mut out = CUmemGenericAllocationHandle(0);
                let number = match seen.exported.last() {
                    Some(exported) if numbers.below(4) > 0 => exported.as_raw_fd() as u64,
                    _ => numbers.next(),
                };
                let kind = CUmemAllocationHandleType(numbers.below(3) as u32);
                if raw.cuMemImportFromShareableHandle(&raw mut out, opaque(number), kind).is_success() {
                    seen.handles.push(out.0);
                }
            }
            18 => {
                let mut out = CUevent::NULL;
                if raw.cuEventCreate(&raw mut out, CUevent_flags(numbers.below(9) as u32)).is_success() {
                    seen.events.push(out.0.addr() as u64);
                }
                if numbers.below(2) == 0 {
                    _ = raw.cuEventDestroy(event);
                }
            }
            19 => {
                _ = raw.cuEventRecord(event, stream);
                _ = raw.cuStreamWaitEvent(CUstream(opaque(numbers.like(&seen.streams))), event, 0);
            }
            20 => _ = [raw.cuEventQuery(event), raw.cuStreamQuery(stream), raw.cuStreamSynchronize(stream)],
            21 => _ = raw.cuStreamBeginCapture(stream, CUstreamCaptureMode(numbers.below(4) as u32)),
            22 => {
                let (mut graph, mut executable) = (CUgraph::NULL, CUgraphExec::NULL);
                if raw.cuStreamEndCapture(stream, &raw mut graph).is_success() {
                    seen.graphs.push(graph.0.addr() as u64);
                }
                let graph = CUgraph(opaque(numbers.like(&seen.graphs)));
                if raw.cuGraphInstantiateWithFlags(&raw mut executable, graph, 0).is_success() {
                    seen.executables.push(executable.0.addr() as u64);
                }
                _ = raw.cuGraphDestroy(graph);
            }
            23 => {
                let executable = CUgraphExec(opaque(numbers.like(&seen.executables)));
                _ = raw.cuGraphLaunch(executable, stream);
                if numbers.below(3) == 0 {
                    _ = raw.cuGraphExecDestroy(executable);
                }
            }
            _ => {}
        }
    }
}

/// Host pointers that work holds on to: a captured copy from the host reads when its graph runs.
static HOST: [u8; 4096] = [7; 4096];

/// What a process can have left over.
#[derive(Debug, PartialEq, Eq)]
struct Left {
    files: usize,
    threads: usize,
    /// Where simulators place what is not huge.
    addresses: usize,
}

fn left() -> Left {
    let entries = |path| std::fs::read_dir(path).unwrap().count();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts = maps.lines().filter_map(|line| u64::from_str_radix(line.split('-').next()?, 16).ok());
    Left {
        files: entries("/proc/self/fd"),
        threads: entries("/proc/self/task"),
        addresses: starts.filter(|start| (0x0100_0000_0000..0x0800_0000_0000).contains(start)).count(),
    }
}

fn enter(raw: &dyn RawDriver) {
    let mut context = CUcontext::NULL;
    // SAFETY: the output is a local.
    let codes = unsafe { [raw.cuDevicePrimaryCtxRetain(&raw mut context, CUdevice(0)), raw.cuCtxSetCurrent(context)] };
    assert!(codes.iter().all(|code| code.is_success()));
}

#[test]
fn any_calls_get_an_answer_and_leave_nothing_behind() {
    for (preset, seed) in [(Preset::Strict, 0x9E37_79B9_7F4A_7C15), (Preset::Measured, 0xD1B5_4A32_D192_ED03)] {
        let before = left();
        let simulator = Simulator::new(Machine::small().preset(preset).device_memory(1 << 26));
        let driver: Driver = simulator.driver().unwrap();
        enter(driver.raw());
        let canary = vec![0x5A_u8; 1 << 20];
        let (mut numbers, mut seen) = (Numbers(seed), Seen::default());
        for index in 0..CALLS {
            call(driver.raw(), &mut numbers, &mut seen);
            if index % 512 == 0 {
                // A broken context would refuse all later work.
                // SAFETY: numbers alone.
                let _ = unsafe { driver.raw().cuDevicePrimaryCtxReset(CUdevice(0)) };
                enter(driver.raw());
            }
        }
        assert!(canary.iter().all(|&byte| byte == 0x5A));
        let live = simulator.live();
        assert!(live.reservations > 0 && live.mappings > 0 && live.allocations > 0, "{live:?}");
        assert!(left().addresses > before.addresses);
        let made = [&seen.events, &seen.graphs, &seen.executables].map(Vec::len);
        assert!(made.iter().all(|&count| count > 10) && live.imported > 0, "{made:?}, {live:?}");
        drop((driver, simulator, seen));
        let until = Instant::now() + Duration::from_secs(20);
        while left() != before {
            assert!(Instant::now() < until, "{:?} is left of {before:?}", left());
            std::thread::yield_now();
        }
    }
}
