//! What no test may do to a GPU that others use, or can't ask of one: drivers that are gone, contexts that are
//! broken for good, machines of another make. On the simulator alone.
//!
//! # Safety
//! Graphs are launched on memory that is gone on purpose: the simulator makes of it what a driver makes of it.
#![allow(unsafe_code)]
// This crate is part of tests: what it did not expect is to stop the test that it happened in.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::thread;
use std::time::{Duration, Instant};

use cuvmm::driver::sys::CUstreamCaptureMode;
use cuvmm::{
    CUresult, Call, Device, HandleKind, OnDrop, Options, Outcome, Release, StreamRef, VirtualMemoryBuffer,
    VirtualMemoryResource, ipc,
};
use cuvmm_sim::{Hints, Live, Machine, Preset, Simulator};
use cuvmm_tests::{Capture, Current, G, MIB, MODES, Stream, buffer_on, drain, queue_fill, require_marks, write_marks};

const PRESETS: [Preset; 2] = [Preset::Strict, Preset::Measured];

fn start(machine: Machine) -> (Simulator, Device) {
    let simulator = Simulator::new(machine);
    let device = simulator.driver().unwrap().device(0).unwrap();
    (simulator, device)
}

fn resource(device: &Device, kind: HandleKind) -> VirtualMemoryResource {
    VirtualMemoryResource::new(device, Options::new().handle_kind(kind)).unwrap()
}

#[test]
fn a_driver_that_has_shut_down_is_no_reason_for_noise() {
    for preset in PRESETS {
        let (simulator, device) = start(Machine::h200().preset(preset));
        let resource = resource(&device, HandleKind::None);
        let stream = Stream::non_blocking(&device);
        let make = || {
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(Release::Stream(stream.clone())).unwrap();
            queue_fill(&stream, &buffer, 1);
            buffer.fence(&stream).unwrap();
            buffer
        };
        let (dropped, closed, grown) = (make(), make(), make().grow_into(2 * G).unwrap());
        simulator.shut_down();
        drop(dropped);
        let error = closed.close().unwrap_err();
        assert_eq!(error.error().code(), Some(CUresult::DEINITIALIZED));
        assert_eq!(grown.grow(3 * G).unwrap_err().code(), Some(CUresult::DEINITIALIZED));
        drop((grown, resource));
        // The process's end gives everything back: there is nothing to count.
        assert_eq!(device.driver().stranded().total(), 0);
        std::mem::forget(stream);
    }
}

/// Breaks the context of a stream, as a kernel does that touches what is not mapped any more.
fn break_context(device: &Device, stream: &StreamRef) {
    let driver = device.driver();
    let _current = Current::push(device);
    let buffer = resource(device, HandleKind::None).allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    // SAFETY: the stream is alive.
    unsafe { driver.stream_begin_capture(stream.as_raw(), CUstreamCaptureMode::RELAXED) }.unwrap();
    queue_fill(stream, &buffer, 1);
    // SAFETY: the stream is alive.
    let graph = unsafe { driver.stream_end_capture(stream.as_raw()) }.unwrap();
    // SAFETY: the graph is ours.
    let executable = unsafe { driver.graph_instantiate(graph) }.unwrap();
    buffer.close().unwrap();
    // SAFETY: the memory is gone, which the simulator survives.
    unsafe { driver.graph_launch(executable, stream.as_raw()) }.unwrap();
    assert!(stream.synchronize().is_err());
}

#[test]
fn memory_is_freed_also_when_its_context_is_broken() {
    for preset in PRESETS {
        let (simulator, device) = start(Machine::h200().preset(preset));
        let stream = Stream::non_blocking(&device);
        let resource = resource(&device, HandleKind::PosixFd);
        let make = || {
            let buffer = resource.allocate(G).unwrap();
            buffer.set_release(Release::Stream(stream.clone())).unwrap();
            buffer
        };
        let (closed, dropped, by_default) = (make(), make(), resource.allocate(G).unwrap());
        break_context(&device, &stream);
        let broken = stream.synchronize().unwrap_err().code();
        assert!(broken.is_some());
        // Virtual memory calls still work: it can even grow, be exported and imported.
        let grown = closed.grow(2 * G).unwrap();
        assert_eq!(grown.outcome(), Some(Outcome::InPlace));
        grown.set_release(Release::Caller).unwrap();
        let alias = ipc::import(&resource, ipc::export(&grown).unwrap()).unwrap();
        alias.set_release(Release::Caller).unwrap();
        alias.close().unwrap();
        grown.close().unwrap();
        let (error, none) = closed.close().unwrap_err().into_parts();
        assert_eq!(error.code(), broken);
        assert!(none.is_none());
        drop(dropped);
        assert_eq!(by_default.close().unwrap_err().error().code(), broken);
        let live = simulator.live();
        assert_eq!((live.reservations, live.allocations, live.mappings), (0, 0, 0));
        assert_eq!(device.driver().stranded().total(), 0);
        // The stream is not: its destruction answers what broke the context.
        std::mem::forget(stream);
    }
}

#[test]
fn everything_works_where_no_hint_is_granted() {
    let refusals = [Hints::Elsewhere, Hints::Refused(CUresult::INVALID_VALUE), Hints::Refused(CUresult::OUT_OF_MEMORY)];
    for (hints, preset) in refusals.into_iter().zip([Preset::Strict, Preset::Measured, Preset::Strict]) {
        let (simulator, device) = start(Machine::h200().preset(preset).hints(hints));
        let resource = resource(&device, HandleKind::PosixFd);
        let mut buffers = vec![resource.allocate(G).unwrap()];
        write_marks(&buffers[0], 1);
        for _ in 0..3 {
            let last = buffers.last().unwrap();
            let grown = last.grow(last.capacity() + G).unwrap();
            assert_eq!(grown.outcome(), Some(Outcome::Moved));
            require_marks(&grown, 1, G);
            buffers.push(grown);
        }
        let alias = ipc::import(&resource, ipc::export(buffers.last().unwrap()).unwrap()).unwrap();
        require_marks(&alias, 1, G);
        alias.close().unwrap();
        for buffer in buffers {
            buffer.close().unwrap();
        }
        drop(resource);
        // The child that a test beside this one forks has copies of the descriptors.
        assert!(simulator.wait_released(Instant::now() + Duration::from_secs(10)));
        assert_eq!(simulator.live(), Live::default());
    }
}

#[test]
fn a_coarser_granularity_is_kept_by_everything() {
    const COARSE: usize = 64 * MIB;
    for preset in PRESETS {
        let (simulator, device) = start(Machine::h200().preset(preset).granularity(|_, _| COARSE));
        let resource = resource(&device, HandleKind::PosixFd);
        assert_eq!(resource.granularity().bytes(), COARSE);
        let buffer = resource.allocate(5 * MIB).unwrap();
        assert_eq!(buffer.size(), COARSE);
        assert_eq!(buffer.address().0 % COARSE as u64, 0);
        let grown = buffer.grow(COARSE + 1).unwrap();
        assert_eq!(grown.size(), 2 * COARSE);
        grown.copy_from_host(COARSE - 2, b"over").unwrap();
        let descriptor = ipc::export(&grown).unwrap();
        assert_eq!(descriptor.sizes(), [COARSE, COARSE]);
        let alias = ipc::import(&resource, descriptor).unwrap();
        let mut seen = [0; 4];
        alias.copy_to_host(COARSE - 2, &mut seen).unwrap();
        assert_eq!(&seen, b"over");
        for buffer in [buffer, grown, alias] {
            buffer.close().unwrap();
        }
        drop(resource);
        // The child that a test beside this one forks has copies of the descriptors.
        assert!(simulator.wait_released(Instant::now() + Duration::from_secs(10)));
        assert_eq!(simulator.live(), Live::default());
        assert_eq!(simulator.violations(), []);
    }
}

#[test]
fn nothing_is_taken_for_granted_of_a_machine() {
    for preset in PRESETS {
        let simulator = Simulator::new(Machine::odd().preset(preset));
        for ordinal in 0..3 {
            let device = simulator.driver().unwrap().device(ordinal).unwrap();
            for (kind, granularity) in [(HandleKind::None, MIB), (HandleKind::PosixFd, 2 * MIB)] {
                let resource = resource(&device, kind);
                assert_eq!(resource.granularity().bytes(), granularity);
                let buffer = resource.allocate(G + 1).unwrap();
                assert_eq!(buffer.size(), (G + 1).next_multiple_of(granularity));
                buffer.copy_from_host(G - 2, b"over").unwrap();
                let mut seen = [0; 4];
                let grown = buffer.grow(buffer.capacity() + 3 * G).unwrap();
                grown.copy_to_host(G - 2, &mut seen).unwrap();
                assert_eq!(&seen, b"over");
                if kind == HandleKind::PosixFd {
                    let alias = ipc::import(&resource, ipc::export(&grown).unwrap()).unwrap();
                    alias.copy_from_host(G - 2, b"seen").unwrap();
                    grown.copy_to_host(G - 2, &mut seen).unwrap();
                    assert_eq!(&seen, b"seen");
                    alias.close().unwrap();
                }
                grown.close().unwrap();
                buffer.close().unwrap();
            }
        }
        // The child that a test beside this one forks has copies of the descriptors.
        assert!(simulator.wait_released(Instant::now() + Duration::from_secs(10)));
        assert_eq!(simulator.live(), Live::default());
        assert_eq!(simulator.violations(), []);
    }
}

#[test]
fn a_device_that_is_full_is_no_loss() {
    let (simulator, device) = start(Machine::h200().device_memory(16 * G));
    let resource = resource(&device, HandleKind::None);
    let buffers: Vec<VirtualMemoryBuffer> = (0..2).map(|_| resource.allocate(6 * G).unwrap()).collect();
    for buffer in &buffers {
        write_marks(buffer, 1);
    }
    let live = simulator.live();
    let error = resource.allocate(6 * G).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(CUresult::OUT_OF_MEMORY)));
    let error = buffers[0].grow(11 * G).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemCreate), Some(CUresult::OUT_OF_MEMORY)));
    assert_eq!(simulator.live(), live);
    require_marks(&buffers[0], 1, 6 * G);
    let fits = buffers[0].grow(10 * G).unwrap();
    require_marks(&fits, 1, 6 * G);
    fits.close().unwrap();
    for buffer in buffers {
        buffer.close().unwrap();
    }
    resource.allocate(16 * G).unwrap().close().unwrap();
}

#[test]
fn a_narrow_window_of_addresses_is_an_error_of_the_reservation() {
    let window = 1_u64 << 30;
    let (simulator, device) = start(Machine::h200().address_window(window));
    let resource = resource(&device, HandleKind::None);
    let buffer = resource.allocate_with_capacity(G, 1 << 40).unwrap();
    assert!(buffer.capacity() <= 1 << 30 && buffer.capacity() >= 1 << 28, "{:#x}", buffer.capacity());
    let others: Vec<_> = std::iter::from_fn(|| resource.allocate(64 * MIB).ok()).collect();
    let live = simulator.live();
    let error = resource.allocate(64 * MIB).unwrap_err();
    assert_eq!((error.call(), error.code()), (Some(Call::cuMemAddressReserve), Some(CUresult::OUT_OF_MEMORY)));
    assert_eq!(simulator.live(), live);
    // Within its own capacity it grows all the same.
    assert_eq!(buffer.grow(64 * MIB).unwrap().outcome(), Some(Outcome::InPlace));
    drop(others);
    buffer.close().unwrap();
}

#[test]
fn a_device_without_the_attribute_is_refused_when_the_resource_is_made() {
    let without = |attribute: u32| {
        let mut machine = Machine::h200();
        machine.devices[0].attributes.remove(&attribute);
        start(machine).1
    };
    let options = || Options::new().handle_kind(HandleKind::PosixFd);
    let error = VirtualMemoryResource::new(&without(102), Options::new()).unwrap_err();
    assert!(matches!(error, cuvmm_resource::Error::Unsupported { ordinal: 0, .. }), "{error}");
    let device = without(103);
    let error = VirtualMemoryResource::new(&device, options()).unwrap_err();
    assert!(matches!(error, cuvmm_resource::Error::Unsupported { ordinal: 0, .. }), "{error}");
    // Without handles it is fine.
    resource(&device, HandleKind::None).allocate(G).unwrap().close().unwrap();
}

#[test]
fn a_process_that_forked_leaves_the_parents_buffers_alone() {
    let (simulator, device) = start(Machine::h200());
    let resource = resource(&device, HandleKind::None);
    let buffer = resource.allocate(G).unwrap();
    buffer.set_release(Release::Caller).unwrap();
    let live = simulator.live();
    // SAFETY: the child only drops the buffer, which takes no lock there, and ends.
    match unsafe { nix::unistd::fork() }.unwrap() {
        nix::unistd::ForkResult::Child => {
            drop(buffer);
            // SAFETY: nothing of the parent's is to run at the end of the child.
            unsafe { nix::libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { child } => {
            let status = nix::sys::wait::waitpid(child, None).unwrap();
            assert_eq!(status, nix::sys::wait::WaitStatus::Exited(child, 0));
        }
    }
    assert_eq!(simulator.live(), live);
    buffer.close().unwrap();
    assert_eq!(device.driver().stranded().total(), 0);
}

/// What nobody is to do: a real driver can crash where a capture begins while an event is recorded.
#[test]
fn dropped_while_captures_begin_and_end_it_goes_after() {
    const CAPTURES: usize = 200;
    for preset in PRESETS {
        let (simulator, device) = start(Machine::h200().preset(preset));
        let resource = VirtualMemoryResource::new(&device, Options::new().on_drop(OnDrop::Defer)).unwrap();
        let captured = resource.allocate(G).unwrap();
        captured.set_release(Release::Caller).unwrap();
        for stream in [Stream::non_blocking(&device), Stream::blocking(&device)] {
            thread::scope(|scope| {
                let capturing = scope.spawn(|| {
                    for round in 0..CAPTURES {
                        Capture::begin(&stream, MODES[round % MODES.len()], &captured).end();
                        thread::yield_now();
                    }
                });
                while !capturing.is_finished() {
                    drop(buffer_on(&resource, &stream));
                    thread::yield_now();
                }
            });
            drain(&resource);
            stream.synchronize().unwrap();
        }
        captured.close().unwrap();
        assert_eq!((simulator.live().mappings, simulator.violations()), (0, vec![]));
    }
}
