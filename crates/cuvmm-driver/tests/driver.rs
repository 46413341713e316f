//! Drivers, devices and errors: what is refused before any call, and what is said of what a call answers.
//!
//! # Safety
//! Handles are those of the driver in `support`, which looks at none.
#![allow(unsafe_code)]

mod support;

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use cuvmm_driver::sys::*;
use cuvmm_driver::{Call, ComputeCapability, Driver, Error, Hooked, LoadError, RawDriver, StrandedKind};
use support::{Fake, Ledger, uuid};

fn driver() -> Result<(Driver, Arc<Ledger>), Error> {
    let ledger = Arc::new(Ledger::default());
    let driver = Driver::new(Hooked::new(Fake::default(), Arc::clone(&ledger)))?;
    ledger.take();
    Ok((driver, ledger))
}

#[test]
fn an_unknown_ordinal_is_refused_without_a_call() -> Result<(), Error> {
    let (driver, ledger) = driver()?;
    for ordinal in [99, -1, 2, i32::MIN, i32::MAX] {
        assert_eq!(driver.device(ordinal), Err(Error::NoSuchDevice { ordinal, count: 2 }));
    }
    assert_eq!(driver.devices().iter().map(|device| device.ordinal()).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(ledger.names(), []);
    Ok(())
}

#[test]
fn values_of_two_drivers_are_refused_without_a_call() -> Result<(), Error> {
    let (first, first_ledger) = driver()?;
    let (second, second_ledger) = driver()?;
    assert_ne!(first, second);
    assert_eq!(first, first.clone());
    assert_eq!(first.require_same(&second), Err(Error::DifferentDrivers));
    assert_eq!(first.require_same(&first.clone()), Ok(()));

    let (device, peer) = (first.device(0)?, second.device(1)?);
    assert_eq!(device.can_access_peer(&peer), Err(Error::DifferentDrivers));
    let attribute = CUdevice_P2PAttribute::ACCESS_SUPPORTED;
    assert_eq!(device.p2p_attribute(attribute, &peer), Err(Error::DifferentDrivers));
    assert_ne!(device, second.device(0)?);
    assert_eq!(device, first.device(0)?);
    assert_eq!((first_ledger.names(), second_ledger.names()), (vec![], vec![]));
    Ok(())
}

#[test]
fn a_device_says_what_it_is() -> Result<(), Error> {
    let (driver, _) = driver()?;
    let (device, other) = (driver.device(0)?, driver.device(1)?);
    assert_eq!(driver.version().to_string(), "12.4");
    assert_eq!(format!("{driver:?}"), r#"Driver { version: "12.4", devices: 2, .. }"#);
    assert_eq!((device.raw(), other.raw()), (CUdevice(10), CUdevice(11)));
    assert_eq!(other.location(), CUmemLocation { location_type: CUmemLocationType::DEVICE, id: 1 });
    assert_eq!(device.name()?, "Fake device");
    assert_eq!(device.pci_bus_id()?, "0000:3B:00.0");
    assert_eq!(device.total_memory()?, 1 << 30);
    assert_eq!(device.compute_capability()?, ComputeCapability { major: 9, minor: 0 });
    assert_eq!(device.compute_capability()?.to_string(), "9.0");
    assert_eq!((device.host_numa_id()?, other.host_numa_id()?), (None, Some(0)), "-1 is none");
    assert!(device.can_access_peer(&other)?);
    assert_eq!(device.p2p_attribute(CUdevice_P2PAttribute::NATIVE_ATOMIC_SUPPORTED, &other)?, 3);
    Ok(())
}

#[test]
fn a_device_is_found_by_its_identity() -> Result<(), Error> {
    let (driver, _) = driver()?;
    assert_eq!(driver.device_by_uuid(uuid(1))?, Some(driver.device(1)?));
    assert_eq!(driver.device_by_uuid(uuid(2))?, None);
    assert_eq!(uuid(1).to_string(), "GPU-30313233-3435-3637-3839-616263646501");
    assert_eq!(format!("{:?}", uuid(1)), uuid(1).to_string());
    Ok(())
}

/// A driver that is older than an attribute answers 1, which is no failure.
#[test]
fn an_attribute_that_the_driver_does_not_know_is_none() -> Result<(), Error> {
    let (driver, ledger) = driver()?;
    let device = driver.device(0)?;
    assert_eq!(device.attribute(CUdevice_attribute::DMA_BUF_SUPPORTED)?, None);
    assert!(!device.supports_dma_buf()?, "unknown");
    assert!(!device.supports_compression()?, "unknown");
    assert!(!device.supports_rdma()?, "known to be absent");
    assert!(device.supports_virtual_memory()?);
    ledger.fail(Call::cuDeviceGetAttribute, CUresult::DEINITIALIZED);
    let error = device.supports_dma_buf().err();
    assert_eq!(error.as_ref().and_then(Error::code), Some(CUresult::DEINITIALIZED));
    assert!(error.is_some_and(|error| error.is_shut_down() && !error.is_shortage()));
    Ok(())
}

#[test]
fn messages_name_call_code_and_reason() -> Result<(), Error> {
    let (driver, ledger) = driver()?;
    let failure = |code| {
        ledger.fail(Call::cuMemCreate, code);
        driver.mem_create(1, &CUmemAllocationProp::default()).err().map(|error| error.to_string())
    };
    for (code, message) in [
        // In the driver's words where it has some, then in ours, and with the number in any case.
        (CUresult::OUT_OF_MEMORY, "cuMemCreate failed with 2 (CUDA_ERROR_OUT_OF_MEMORY): out of memory"),
        (
            CUresult::NOT_PERMITTED,
            "cuMemCreate failed with 800 (CUDA_ERROR_NOT_PERMITTED): the driver has no text for it",
        ),
        (CUresult(4242), "cuMemCreate failed with 4242 (unnamed code): the driver has no text for it"),
    ] {
        assert_eq!(failure(code).as_deref(), Some(message));
    }
    ledger.heal();

    for (error, message) in [
        (Error::NoSuchDevice { ordinal: 99, count: 2 }, "no device 99: 2 visible to this process"),
        (Error::DifferentDrivers, "values of two different drivers in one operation"),
        (
            Error::Unsupported { symbol: Call::cuUserObjectCreate, since: CudaVersion(11030) },
            "this driver has no cuUserObjectCreate: it came with CUDA 11.3",
        ),
        (Error::InvalidArgument { call: Call::cuMemMap, reason: "it lies" }, "cuMemMap was not called: it lies"),
    ] {
        assert_eq!(error.to_string(), message);
        assert_eq!(error.code(), None, "the driver was not asked");
    }
    assert_eq!(CUresult::UNKNOWN.to_string(), "CUDA_ERROR_UNKNOWN (999)");
    assert_eq!(CUresult(4242).to_string(), "code 4242");
    Ok(())
}

/// Without a device; with code 100 as a machine without one answers, or with none to see.
struct NoDevice(CUresult);

// SAFETY: outputs are written on success.
unsafe impl RawDriver for NoDevice {
    unsafe fn cuInit(&self, _: u32) -> CUresult {
        self.0
    }

    unsafe fn cuDriverGetVersion(&self, version: *mut i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { version.write(13000) };
        CUresult::SUCCESS
    }

    unsafe fn cuDeviceGetCount(&self, count: *mut i32) -> CUresult {
        // SAFETY: the caller's output.
        unsafe { count.write(0) };
        CUresult::SUCCESS
    }
}

#[test]
fn a_driver_that_does_not_start_is_an_error_with_its_cause() {
    let error = Driver::new(NoDevice(CUresult::NO_DEVICE)).err();
    assert_eq!(error.as_ref().and_then(Error::code), Some(CUresult::NO_DEVICE));
    assert_eq!(error.as_ref().and_then(Error::call), Some(Call::cuInit));
    let error = error.map(LoadError::from);
    let text = error.as_ref().map(ToString::to_string);
    assert_eq!(text.as_deref(), Some("the driver was loaded but does not start"));
    let cause = error.as_ref().and_then(std::error::Error::source).map(ToString::to_string);
    let expected = "cuInit failed with 100 (CUDA_ERROR_NO_DEVICE): the driver has no text for it";
    assert_eq!(cause.as_deref(), Some(expected));
}

#[test]
fn a_driver_without_devices_starts() -> Result<(), Error> {
    let driver = Driver::new(NoDevice(CUresult::SUCCESS))?;
    assert_eq!((driver.device_count(), driver.devices().len()), (0, 0));
    assert_eq!(driver.device(0), Err(Error::NoSuchDevice { ordinal: 0, count: 0 }));
    Ok(())
}

#[test]
fn work_that_is_not_done_is_an_answer() -> Result<(), Error> {
    let (driver, ledger) = driver()?;
    // SAFETY: the fake driver only looks whether the handle is null.
    assert!(unsafe { driver.stream_query(CUstream::NULL) }?);
    // SAFETY: as above.
    assert!(!unsafe { driver.stream_query(CUstream::PER_THREAD) }?);
    // SAFETY: as above.
    assert!(unsafe { driver.event_query(CUevent::NULL) }?);
    ledger.fail(Call::cuEventQuery, CUresult::CAPTURED_EVENT);
    // SAFETY: as above.
    let error = unsafe { driver.event_query(CUevent::NULL) }.err();
    assert_eq!(error.as_ref().and_then(Error::code), Some(CUresult::CAPTURED_EVENT));
    Ok(())
}

#[test]
fn the_capture_mode_that_was_is_given_back() -> Result<(), Error> {
    let (driver, ledger) = driver()?;
    let before = driver.thread_exchange_stream_capture_mode(CUstreamCaptureMode::RELAXED)?;
    assert_eq!(before, CUstreamCaptureMode::GLOBAL);
    assert_eq!(ledger.names(), [Call::cuThreadExchangeStreamCaptureMode]);
    Ok(())
}

/// One attribute writes sixteen bytes, and those to come may too.
#[test]
fn an_attribute_of_unknown_width_is_refused_without_a_call() -> Result<(), Error> {
    let (driver, ledger) = driver()?;
    let address = CUdeviceptr(0x1000);
    for attribute in [0, 5, 17, 21, 22, 1000] {
        let error = driver.pointer_get_attribute(CUpointer_attribute(attribute), address).err();
        assert!(matches!(error, Some(Error::InvalidArgument { call: Call::cuPointerGetAttribute, .. })));
    }
    assert_eq!(ledger.names(), []);
    // The fake driver writes one byte, as the driver does for a truth value: the rest is zero.
    assert_eq!(driver.pointer_get_attribute(CUpointer_attribute::MAPPED, address)?, 1);
    Ok(())
}

#[test]
fn descriptor_zero_is_refused_without_a_call() -> Result<(), Box<dyn std::error::Error>> {
    let (driver, ledger) = driver()?;
    // SAFETY: descriptor 0 is open as long as nobody closes it, which no test does.
    let zero = unsafe { BorrowedFd::borrow_raw(0) };
    let error = driver.mem_import_posix_fd(zero).err();
    assert!(matches!(error, Some(Error::InvalidArgument { call: Call::cuMemImportFromShareableHandle, .. })));
    assert_eq!(ledger.names(), []);

    let file = File::open("/dev/null")?;
    let _handle = driver.mem_import_posix_fd(file.as_fd())?;
    let calls = ledger.take();
    let number = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&file))?;
    assert_eq!(calls[0].1[1..], [number, 1], "the number itself, and the kind");
    Ok(())
}

#[test]
fn what_is_stranded_is_counted_by_kind() -> Result<(), Error> {
    let (driver, _) = driver()?;
    assert!(driver.stranded().is_empty());
    for kind in [StrandedKind::Mapping, StrandedKind::Mapping, StrandedKind::Buffer] {
        driver.clone().stranded().add(kind);
    }
    assert_eq!(driver.stranded().count(StrandedKind::Mapping), 2);
    assert_eq!(driver.stranded().count(StrandedKind::Reservation), 0);
    assert_eq!(driver.stranded().total(), 3);
    Ok(())
}

#[test]
fn addresses_and_masks_are_checked() {
    assert_eq!(CUdeviceptr(1 << 20).checked_add(4096), Some(CUdeviceptr((1 << 20) + 4096)));
    assert_eq!(CUdeviceptr(u64::MAX).checked_add(1), None);
    assert_eq!(CUdeviceptr(0xABC0).to_string(), "0xabc0");
    let both = CUmemAllocationHandleType(9);
    assert!(both.contains(CUmemAllocationHandleType::FABRIC) && both.contains(CUmemAllocationHandleType::NONE));
    assert!(!CUmemAllocationHandleType::FABRIC.contains(both));
    assert!(CUstream::NULL.is_default_token() && CUstream::LEGACY.is_default_token());
    assert!(!CUstream(std::ptr::without_provenance_mut(3)).is_default_token());
}

#[test]
fn drivers_and_devices_cross_threads() {
    fn shared<T: Send + Sync + 'static>() {}
    shared::<Driver>();
    shared::<cuvmm_driver::Device>();
    shared::<Error>();
    shared::<LoadError>();
}
