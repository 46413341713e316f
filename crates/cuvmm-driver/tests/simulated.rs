//! The typed calls on a simulated driver that keeps the driver's rules: memory, streams, events, contexts, capture,
//! and what is probed of a machine.
//!
//! # Safety
//! Handles and ranges are those that each test made, used while they are alive.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::os::fd::AsFd;
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use cuvmm_driver::sys::*;
use cuvmm_driver::{
    Call, CaptureInfo, Driver, Error, Probe, RawDriver, Served, StrandedKind, Symbol, Table, entry_point,
};
use cuvmm_sim::{Machine, Simulator};

type Result<T = (), E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

fn start(machine: Machine) -> Result<(Simulator, Driver), Error> {
    let simulator = Simulator::new(machine);
    let driver = simulator.driver()?;
    Ok((simulator, driver))
}

fn code<T>(result: Result<T, Error>) -> Option<CUresult> {
    result.err().and_then(|error| error.code())
}

/// Reserves, makes, maps and grants `size` bytes on the first device, and gives the handle back.
fn mapped(driver: &Driver, size: usize) -> Result<CUdeviceptr, Error> {
    let location = driver.device(0)?.location();
    let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    let address = driver.mem_address_reserve(size, 0, CUdeviceptr(0))?;
    let handle = driver.mem_create(size, &properties)?;
    // SAFETY: the reservation and the allocation are this function's, and of the same size.
    unsafe { driver.mem_map(address, size, handle) }?;
    // SAFETY: the mapping holds the memory from here on.
    unsafe { driver.mem_release(handle) }?;
    // SAFETY: the mapping is this function's.
    unsafe {
        driver.mem_set_access(address, size, &[CUmemAccessDesc { location, flags: CUmemAccess_flags::READWRITE }])
    }?;
    Ok(address)
}

fn unmap(driver: &Driver, address: CUdeviceptr, size: usize) -> Result<(), Error> {
    // SAFETY: each test waited for its work.
    unsafe { driver.mem_unmap(address, size) }?;
    // SAFETY: nothing is mapped there any more.
    unsafe { driver.mem_address_free(address, size) }
}

/// Runs `work` with the first device's primary context current, and a stream of it.
fn with_stream(driver: &Driver, work: impl FnOnce(CUstream) -> Result) -> Result {
    let device = driver.device(0)?;
    let context = device.primary_ctx_retain()?;
    // SAFETY: the context was retained just now.
    unsafe { driver.ctx_push_current(context) }?;
    let stream = driver.stream_create(CUstream_flags::NON_BLOCKING)?;
    work(stream)?;
    // SAFETY: the stream is this function's, and idle.
    unsafe { driver.stream_destroy(stream) }?;
    // SAFETY: it was pushed above.
    assert_eq!(unsafe { driver.ctx_pop_current() }?, context);
    // SAFETY: the reference is this function's.
    unsafe { device.primary_ctx_release() }?;
    Ok(())
}

#[test]
fn a_machine_without_imex_has_descriptors_and_no_fabric() -> Result {
    let (simulator, driver) = start(Machine::h200_pair())?;
    for device in driver.devices() {
        assert!(device.supports_virtual_memory()?);
        assert!(device.supports_rdma()? && device.supports_compression()? && device.supports_dma_buf()?);
        let fabric = device.attribute(CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED)?;
        assert_eq!(fabric, Some(1), "what the attribute promises");
        let probe = device.probe(CUmemAllocationHandleType::FABRIC);
        assert!(matches!(&probe, Probe::Refused { call: Call::cuMemCreate, error } if
            error.code() == Some(CUresult::NOT_PERMITTED)));
        assert_eq!(device.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR), Probe::Available);
        let both = CUmemAllocationHandleType(9);
        assert!(!device.probe(both).is_available());
    }
    assert!(simulator.live().is_empty(), "{:?}", simulator.live());
    assert_eq!(simulator.violations(), []);
    Ok(())
}

#[test]
fn nobody_asked_means_nothing_probed() -> Result {
    let (simulator, driver) = start(Machine::h200_pair())?;
    assert!(driver.device(0)?.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR).is_available());
    let made = simulator.calls().iter().filter(|call| **call == Call::cuMemCreate).count();
    assert_eq!(made, 1, "one kind on one device");
    Ok(())
}

#[test]
fn a_probe_leaves_a_capture_alive() -> Result {
    let (simulator, driver) = start(Machine::h200())?;
    with_stream(&driver, |stream| {
        // SAFETY: the stream is alive.
        unsafe { driver.stream_begin_capture(stream, CUstreamCaptureMode::GLOBAL) }?;
        assert!(driver.device(0)?.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR).is_available());
        // SAFETY: the stream is alive.
        let graph = unsafe { driver.stream_end_capture(stream) }?;
        // SAFETY: the graph is this test's.
        unsafe { driver.graph_destroy(graph) }?;
        Ok(())
    })?;
    assert_eq!(simulator.violations(), []);
    Ok(())
}

/// A host function's refusals say nothing of a kind.
#[test]
fn a_probe_in_a_host_function_is_not_remembered() -> Result {
    static REFUSED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn probe(driver: *mut c_void) {
        // SAFETY: the test passes a driver that outlives the call.
        let driver = unsafe { &*driver.cast::<Driver>() };
        let probe = driver.device(0).map(|device| device.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR));
        REFUSED.fetch_add(usize::from(matches!(probe, Ok(Probe::Refused { .. }))), Ordering::SeqCst);
    }

    let (_, driver) = start(Machine::h200())?;
    with_stream(&driver, |stream| {
        // SAFETY: the stream is alive, and the driver until the work is waited for.
        unsafe { driver.launch_host_func(stream, Some(probe), (&raw const driver).cast_mut().cast()) }?;
        // SAFETY: the stream is alive.
        unsafe { driver.stream_synchronize(stream) }?;
        Ok(())
    })?;
    assert_eq!(REFUSED.load(Ordering::SeqCst), 1);
    assert!(driver.device(0)?.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR).is_available());
    Ok(())
}

/// A drop may make calls, but in a host function, where that is counted.
#[test]
fn a_drop_in_a_host_function_is_told_by_one_call_and_counted() -> Result {
    static INSIDE: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn ask(driver: *mut c_void) {
        // SAFETY: the test passes a driver that outlives the call.
        let driver = unsafe { &*driver.cast::<Driver>() };
        let told = driver.is_in_host_function() == Ok(true) && !driver.may_drop("a thing of the test is kept");
        INSIDE.fetch_add(usize::from(told), Ordering::SeqCst);
    }

    let (simulator, driver) = start(Machine::h200())?;
    assert_eq!((driver.is_in_host_function(), driver.may_drop("nothing")), (Ok(false), true));
    assert!(driver.stranded().is_empty());
    with_stream(&driver, |stream| {
        // SAFETY: the stream is alive, and the driver until the work is waited for.
        unsafe { driver.launch_host_func(stream, Some(ask), (&raw const driver).cast_mut().cast()) }?;
        // SAFETY: the stream is alive.
        unsafe { driver.stream_synchronize(stream) }?;
        Ok(())
    })?;
    assert_eq!((INSIDE.load(Ordering::SeqCst), driver.stranded().count(StrandedKind::Other)), (1, 1));
    // One call each.
    assert_eq!(simulator.violations().iter().map(|found| found.call).collect::<Vec<_>>(), [Call::cuCtxGetCurrent; 2]);
    simulator.shut_down();
    assert_eq!(code(driver.is_in_host_function()), Some(CUresult::DEINITIALIZED));
    Ok(())
}

#[test]
fn bytes_come_back_as_they_went_and_as_they_were_set() -> Result {
    let (simulator, driver) = start(Machine::h200())?;
    let size = 2 << 20;
    let address = mapped(&driver, size)?;
    with_stream(&driver, |stream| {
        let sent: Vec<u8> = (0..=255).collect();
        let mut got = vec![0_u8; 1024];
        // SAFETY: both ranges have the bytes, and are kept until the work is waited for; so in each call below.
        unsafe { driver.memcpy_htod_async(address, sent.as_ptr().cast(), 256, stream) }?;
        // SAFETY: as above.
        unsafe { driver.memcpy_dtod_async(CUdeviceptr(address.0 + 256), address, 256, stream) }?;
        // SAFETY: as above.
        unsafe { driver.memset_d8_async(CUdeviceptr(address.0 + 512), 0x5A, 256, stream) }?;
        // SAFETY: as above.
        unsafe { driver.memset_d32_async(CUdeviceptr(address.0 + 768), 0x0403_0201, 64, stream) }?;
        // SAFETY: as above.
        unsafe { driver.memcpy_dtoh_async(got.as_mut_ptr().cast(), address, 1024, stream) }?;
        let event = driver.event_create(CUevent_flags::DISABLE_TIMING)?;
        // SAFETY: the stream and the event are alive, and of one context; so in each call below.
        unsafe { driver.event_record(event, stream) }?;
        // SAFETY: as above.
        unsafe { driver.event_synchronize(event) }?;
        // SAFETY: as above.
        assert!(unsafe { driver.event_query(event) }? && unsafe { driver.stream_query(stream) }?);
        // SAFETY: the event is this test's.
        unsafe { driver.event_destroy(event) }?;

        assert_eq!(got[..256], sent);
        assert_eq!(got[256..512], sent);
        assert!(got[512..768].iter().all(|byte| *byte == 0x5A));
        assert!(got[768..].chunks(4).all(|word| word == [1, 2, 3, 4]));
        assert_eq!(driver.mem_get_address_range(address)?, (address, size));
        assert_eq!(driver.pointer_get_attribute(CUpointer_attribute::MAPPING_SIZE, address)?, size as u64);
        Ok(())
    })?;
    let access = driver.mem_get_access(driver.device(0)?.location(), address)?;
    assert_eq!(access, CUmemAccess_flags::READWRITE);
    unmap(&driver, address, size)?;
    assert!(simulator.live().is_empty(), "{:?}", simulator.live());
    assert_eq!(simulator.violations(), []);
    Ok(())
}

#[test]
fn an_exported_descriptor_is_imported_as_the_same_memory() -> Result {
    let (simulator, driver) = start(Machine::h200())?;
    let location = driver.device(0)?.location();
    let properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR);
    let made = driver.mem_create(2 << 20, &properties)?;
    // SAFETY: the handle was made just now.
    let fd = unsafe { driver.mem_export_posix_fd(made) }?;
    let imported = driver.mem_import_posix_fd(fd.as_fd())?;
    // SAFETY: both are alive.
    let seen = unsafe { driver.mem_get_allocation_properties(imported) }?;
    assert_eq!(seen.location, location);
    for handle in [made, imported] {
        // SAFETY: each is this test's, and given back once.
        unsafe { driver.mem_release(handle) }?;
    }
    drop(fd);
    assert!(simulator.live().is_empty(), "{:?}", simulator.live());
    Ok(())
}

#[test]
fn contexts_are_a_stack_of_each_thread() -> Result {
    let (simulator, driver) = start(Machine::h200_pair())?;
    let (first, second) = (driver.device(0)?, driver.device(1)?);
    assert!(driver.ctx_get_current()?.is_null());
    assert_eq!(code(driver.ctx_get_device()), Some(CUresult::INVALID_CONTEXT));
    // SAFETY: there is none to pop.
    assert_eq!(code(unsafe { driver.ctx_pop_current() }), Some(CUresult::INVALID_CONTEXT));
    assert!(!first.primary_ctx_is_active()?);

    let (one, two) = (first.primary_ctx_retain()?, second.primary_ctx_retain()?);
    assert!(first.primary_ctx_is_active()? && driver.ctx_get_current()?.is_null(), "made, and not current");
    // SAFETY: both contexts were retained; so in each call below.
    unsafe { driver.ctx_push_current(one) }?;
    // SAFETY: as above.
    unsafe { driver.ctx_push_current(two) }?;
    assert_eq!(driver.ctx_get_device()?, second.raw());
    // SAFETY: as above.
    unsafe { driver.ctx_set_current(one) }?;
    assert_eq!(driver.ctx_get_device()?, first.raw());
    driver.ctx_synchronize()?;
    let info = driver.mem_get_info()?;
    assert!(info.free <= info.total && info.total == first.total_memory()?);
    for _ in 0..2 {
        // SAFETY: it was pushed above.
        assert_eq!(unsafe { driver.ctx_pop_current() }?, one);
    }
    for device in [first, second] {
        // SAFETY: the reference is this test's.
        unsafe { device.primary_ctx_release() }?;
        assert!(!device.primary_ctx_is_active()?);
    }
    assert!(simulator.live().is_empty(), "{:?}", simulator.live());
    Ok(())
}

#[test]
fn a_capture_is_told_begun_and_ended() -> Result {
    let (_, driver) = start(Machine::h200())?;
    let address = mapped(&driver, 2 << 20)?;
    with_stream(&driver, |stream| {
        // SAFETY: the stream is alive; so in each call below.
        assert_eq!(unsafe { driver.stream_get_capture_info(stream) }?, CaptureInfo::default());
        // SAFETY: as above.
        unsafe { driver.stream_begin_capture(stream, CUstreamCaptureMode::THREAD_LOCAL) }?;
        // SAFETY: as above.
        assert_eq!(unsafe { driver.stream_is_capturing(stream) }?, CUstreamCaptureStatus::ACTIVE);
        // SAFETY: as above.
        let info = unsafe { driver.stream_get_capture_info(stream) }?;
        assert_eq!(info.status, CUstreamCaptureStatus::ACTIVE);
        assert!(info.id != 0 && !info.graph.is_null());
        // SAFETY: the range is mapped until the graph is destroyed.
        unsafe { driver.memset_d8_async(address, 7, 16, stream) }?;
        // SAFETY: as above.
        let graph = unsafe { driver.stream_end_capture(stream) }?;
        // SAFETY: the graph is alive.
        let executable = unsafe { driver.graph_instantiate(graph) }?;
        // SAFETY: the graph is this test's.
        unsafe { driver.graph_destroy(graph) }?;
        // SAFETY: the executable is alive, and the range mapped.
        unsafe { driver.graph_launch(executable, stream) }?;
        // SAFETY: as above.
        unsafe { driver.stream_synchronize(stream) }?;
        // SAFETY: the executable is this test's.
        unsafe { driver.graph_exec_destroy(executable) }?;
        Ok(())
    })?;
    unmap(&driver, address, 2 << 20)?;
    Ok(())
}

#[test]
fn a_wait_breaks_a_capture_unless_the_thread_is_relaxed() -> Result {
    let (_, driver) = start(Machine::h200())?;
    with_stream(&driver, |captured| {
        let other = driver.stream_create(CUstream_flags::NON_BLOCKING)?;
        // SAFETY: both streams are alive; so in each call below.
        unsafe { driver.stream_begin_capture(captured, CUstreamCaptureMode::GLOBAL) }?;
        let before = driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::RELAXED)?;
        assert_eq!(before, CUstreamCaptureMode::GLOBAL);
        // SAFETY: as above.
        unsafe { driver.stream_synchronize(other) }?;
        assert_eq!(driver.thread_exchange_stream_capture_mode(before)?, CUstreamCaptureMode::RELAXED);
        // SAFETY: as above.
        assert_eq!(unsafe { driver.stream_is_capturing(captured) }?, CUstreamCaptureStatus::ACTIVE);
        // SAFETY: as above.
        assert_eq!(code(unsafe { driver.stream_synchronize(other) }), Some(CUresult::STREAM_CAPTURE_UNSUPPORTED));
        // SAFETY: as above.
        let ended = code(unsafe { driver.stream_end_capture(captured) });
        assert_eq!(ended, Some(CUresult::STREAM_CAPTURE_INVALIDATED));
        // SAFETY: the stream is this test's, and idle.
        unsafe { driver.stream_destroy(other) }?;
        Ok(())
    })
}

/// What came after the driver is known to be missing.
#[test]
fn an_old_driver_says_what_it_lacks() -> Result {
    let (_, driver) = start(Machine::h200().driver_version(11000))?;
    assert_eq!(driver.version().to_string(), "11.0");
    assert!(driver.raw().provides(Call::cuMemRetainAllocationHandle));
    assert!(!driver.raw().provides(Call::cuStreamGetCaptureInfo));
    let symbol = Call::cuDeviceGetUuid;
    assert_eq!(driver.device(0)?.uuid(), Err(Error::Unsupported { symbol, since: CudaVersion(11040) }));
    Ok(())
}

#[test]
fn a_driver_that_shuts_down_answers_so() -> Result {
    let (simulator, driver) = start(Machine::h200())?;
    simulator.shut_down();
    let probe = driver.device(0)?.probe(CUmemAllocationHandleType::NONE);
    assert!(matches!(probe, Probe::Refused { error, .. } if error.code() == Some(CUresult::DEINITIALIZED)));
    assert_eq!(code(driver.mem_address_reserve(2 << 20, 0, CUdeviceptr(0))), Some(CUresult::DEINITIALIZED));
    Ok(())
}

/// Serves one simulated driver through C entry points.
struct Exported;

static EXPORTED: LazyLock<Simulator> = LazyLock::new(|| Simulator::new(Machine::h200()));

impl Served for Exported {
    fn served() -> &'static dyn RawDriver {
        &*EXPORTED
    }
}

/// As in a library that stands in for libcuda: everything crosses a C boundary twice.
#[test]
fn a_driver_behind_c_entry_points_is_the_same_driver() -> Result {
    let mut source = |symbol: &Symbol| {
        if EXPORTED.provides(symbol.call) || symbol.core {
            entry_point::<Exported>(symbol.call)
        } else {
            std::ptr::null()
        }
    };
    // SAFETY: an entry point has its symbol's signature and lives as long as the program.
    let driver = Driver::new(unsafe { Table::from_source(&mut source) }?)?;
    assert_eq!(driver.device(0)?.name()?, EXPORTED.driver()?.device(0)?.name()?);
    let address = mapped(&driver, 4 << 20)?;
    assert!(EXPORTED.is_mapped(address));
    unmap(&driver, address, 4 << 20)?;
    assert!(driver.device(0)?.probe(CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR).is_available());
    assert!(EXPORTED.live().is_empty(), "{:?}", EXPORTED.live());
    assert_eq!(EXPORTED.violations(), []);
    Ok(())
}
