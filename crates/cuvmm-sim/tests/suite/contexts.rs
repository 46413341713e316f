//! Starting and stopping, contexts and devices: rules R1 to R9.

use cuvmm_driver::sys::*;
use cuvmm_driver::{CUresult, Call, Driver, Error, RawDriver};
use cuvmm_sim::{Machine, Preset, Simulator};

use crate::common::{Gpu, UNIT, ok};

#[test]
fn before_the_start_every_call_answers_3() {
    let raw = Simulator::new(Machine::h200());
    let (mut count, mut address, mut version) = (0, CUdeviceptr(0), 0);
    // SAFETY: the outputs are locals.
    unsafe {
        assert_eq!(raw.cuDeviceGetCount(&raw mut count).0, 3);
        assert_eq!(raw.cuMemAddressReserve(&raw mut address, UNIT, 0, CUdeviceptr(0), 0).0, 3);
        assert_eq!(raw.cuMemUnmap(CUdeviceptr(0), 0).0, 3);
        assert_eq!(raw.cuDriverGetVersion(&raw mut version).0, 0, "but this one");
        assert_eq!(raw.cuInit(1).0, 1);
        assert_eq!(raw.cuDeviceGetCount(&raw mut count).0, 3, "a failed start is none");
        assert_eq!([raw.cuInit(0).0, raw.cuInit(0).0], [0, 0]);
        assert_eq!(raw.cuDeviceGetCount(&raw mut count).0, 0);
    }
    assert_eq!((version, count), (13000, 1));
}

#[test]
fn a_machine_without_devices_does_not_start() {
    let error = Simulator::new(Machine::h200().visible(&[])).driver().unwrap_err();
    assert_eq!(error.code(), Some(CUresult::NO_DEVICE));
}

#[test]
fn after_the_shutdown_every_call_answers_4() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        gpu.simulator.shut_down();
        assert_eq!(gpu.unmap(buffer.address, UNIT), 4);
        assert_eq!(gpu.release(buffer.handle), 4);
        assert_eq!(gpu.current(), Err(4));
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn codes_have_names_and_texts() {
    let gpu = Gpu::strict();
    let error = gpu.driver.mem_address_reserve(1, 0, CUdeviceptr(0)).unwrap_err();
    assert_eq!(error.to_string(), "cuMemAddressReserve failed with 1 (CUDA_ERROR_INVALID_VALUE): invalid argument");
    let mut name = std::ptr::dangling();
    // SAFETY: the output is a local.
    assert_eq!(unsafe { gpu.raw().cuGetErrorName(CUresult(77_777), &raw mut name) }.0, 1);
    assert!(name.is_null());
}

#[test]
fn an_old_driver_lacks_later_calls_and_attributes() {
    let gpu = Gpu::new(Machine::h200().driver_version(10020));
    let missing = [Call::cuMemRetainAllocationHandle, Call::cuGraphInstantiateWithFlags, Call::cuDeviceGetUuid];
    assert!(missing.iter().all(|&call| !gpu.raw().provides(call)));
    assert!(gpu.raw().provides(Call::cuMemMap));
    let error = gpu.driver.device(0).unwrap().uuid().unwrap_err();
    assert!(matches!(error, Error::Unsupported { symbol: Call::cuDeviceGetUuid, .. }), "{error}");
    let device = gpu.driver.device(0).unwrap();
    let fabric = CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED;
    assert_eq!(device.attribute(fabric).unwrap(), None);
    let supported = CUdevice_attribute::VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    assert_eq!(device.attribute(supported).unwrap(), Some(1));
    for (attribute, since) in [(112, 11010), (128, 12030), (132, 12010), (133, 12030), (134, 12020)] {
        let known = |version| {
            let device = Gpu::new(Machine::h200().driver_version(version)).driver.device(0).unwrap();
            device.attribute(CUdevice_attribute(attribute)).unwrap().is_some()
        };
        assert!(known(since) && !known(since - 10), "{attribute}");
    }
}

#[test]
fn outputs_are_all_checked_before_any_is_written() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (mut flags, mut active) = (7_u32, 7_i32);
        let device = CUdevice(0);
        // SAFETY: the outputs are null or locals.
        let codes = unsafe {
            [
                gpu.raw().cuDevicePrimaryCtxGetState(device, &raw mut flags, std::ptr::null_mut()),
                gpu.raw().cuDevicePrimaryCtxGetState(device, std::ptr::null_mut(), &raw mut active),
                gpu.raw().cuDevicePrimaryCtxGetState(CUdevice(9), &raw mut flags, &raw mut active),
            ]
        };
        assert_eq!(codes.map(|code| code.0), [1, 1, 101]);
        assert_eq!((flags, active), (7, 7));
    }
}

#[test]
fn what_went_with_a_context_is_refused() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let (stream, event) = (gpu.stream(CUstream_flags::NON_BLOCKING), gpu.event());
        let context = gpu.enter(0);
        // SAFETY: numbers alone.
        assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }.0, 0);
        gpu.enter(0);
        let lax = gpu.simulator.machine().preset == Preset::Measured;
        assert_eq!(gpu.set_current(context), if lax { 0 } else { 709 });
        assert_eq!(gpu.violations(), [""; 0]);
        assert_eq!([gpu.event_query(event), gpu.event_destroy(event)], [201, 201]);
        assert_eq!([gpu.synchronize(stream), gpu.query(stream), gpu.host(stream, || {})], [709; 3]);
        assert_eq!((gpu.destroy(stream), gpu.status(stream)), (709, Err(709)));
        assert_eq!(gpu.violations().len(), 7, "a real driver can crash each time");
        gpu.simulator.clear_violations();
        // What never was is another matter.
        assert_eq!(gpu.synchronize(CUstream(std::ptr::without_provenance_mut(0x77770))), 400);
        assert_eq!(gpu.violations().len(), 1);
    }
}

#[test]
fn a_primary_context_is_not_destroyed_by_name() {
    for gpu in Gpu::both() {
        let context = gpu.enter(0);
        // SAFETY: nothing runs in it.
        assert_eq!(unsafe { gpu.raw().cuCtxDestroy(context) }.0, 201);
        // SAFETY: it names none.
        assert_eq!(unsafe { gpu.raw().cuCtxDestroy(CUcontext::NULL) }.0, 1);
        assert!(gpu.is_active(0));
        assert_eq!(gpu.host(CUstream::LEGACY, || {}), 0, "it works on");
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn devices_are_what_the_machine_has() {
    let machine = Machine::h200_pair();
    let gpu = Gpu::new(machine.clone());
    let devices = gpu.driver.devices();
    assert_eq!(devices.len(), 2);
    for (device, model) in devices.iter().zip(&machine.devices) {
        assert_eq!(device.name().unwrap(), model.name);
        assert_eq!(device.uuid().unwrap(), model.uuid);
        assert_eq!(device.total_memory().unwrap(), 150_109_880_320);
    }
    assert_ne!(devices[0].uuid().unwrap(), devices[1].uuid().unwrap());
    assert!(devices[0].can_access_peer(&devices[1]).unwrap());
    let mut alone = machine;
    alone.devices[0].peers.clear();
    let devices = Gpu::new(alone).driver.devices();
    assert!(!devices[0].can_access_peer(&devices[1]).unwrap());
    assert!(devices[1].can_access_peer(&devices[0]).unwrap());
}

#[test]
fn attributes_of_an_h200_are_the_measured_ones() {
    let measured = [
        (102, 1),
        (103, 1),
        (104, 0),
        (105, 0),
        (107, 1),
        (110, 1),
        (115, 1),
        (116, 1),
        (117, 1),
        (118, 100),
        (119, 9),
        (124, 1),
        (125, 1),
        (128, 1),
        (130, 0),
        (131, -1),
        (132, 1),
        (134, 0),
        (141, 1),
        (142, 1),
        (143, 0),
        (144, 1),
        (145, 1),
        (146, 0),
        (18, 0),
        (41, 1),
        (88, 0),
        (89, 1),
    ];
    let device = Gpu::measured().driver.device(0).unwrap();
    for (attribute, value) in measured {
        assert_eq!(device.attribute(CUdevice_attribute(attribute)).unwrap(), Some(value), "{attribute}");
    }
    for unknown in [0, 148, 1000] {
        assert_eq!(device.attribute(CUdevice_attribute(unknown)).unwrap(), None, "{unknown}");
    }
}

#[test]
fn names_are_cut_to_the_room_there_is() {
    let gpu = Gpu::strict();
    let mut name = [1_u8; 8];
    // SAFETY: the buffer has the length that is passed.
    let code = unsafe { gpu.raw().cuDeviceGetName(name.as_mut_ptr().cast(), 5, CUdevice(0)) };
    assert_eq!((code.0, &name), (0, b"Simu\0\x01\x01\x01"));
    // SAFETY: as above; nothing is written.
    assert_eq!(unsafe { gpu.raw().cuDeviceGetName(name.as_mut_ptr().cast(), 5, CUdevice(9)) }.0, 101);
}

#[test]
fn primary_contexts_are_counted() {
    for gpu in Gpu::both() {
        assert!(!gpu.is_active(0));
        let context = gpu.retain_primary(0).unwrap();
        assert_eq!(gpu.retain_primary(0), Ok(context), "one context");
        assert_eq!(gpu.current(), Ok(0), "a retain makes nothing current");
        let release = || {
            // SAFETY: numbers alone.
            unsafe { gpu.raw().cuDevicePrimaryCtxRelease(CUdevice(0)) }.0
        };
        assert_eq!(release(), 0);
        assert!(gpu.is_active(0));
        assert_eq!(release(), 0);
        assert!(!gpu.is_active(0));
        assert_eq!(release(), 201);
        assert_eq!(gpu.retain_primary(9), Err(101));
    }
}

#[test]
fn each_thread_has_a_stack_of_contexts() {
    let gpu = Gpu::new(Machine::h200_pair());
    let (first, second) = (gpu.retain_primary(0).unwrap(), gpu.retain_primary(1).unwrap());
    let pop = || {
        let mut context = CUcontext::NULL;
        // SAFETY: the output is a local.
        let code = unsafe { gpu.raw().cuCtxPopCurrent(&raw mut context) };
        ok(code, context)
    };
    let push = |context| {
        // SAFETY: numbers alone.
        unsafe { gpu.raw().cuCtxPushCurrent(context) }.0
    };
    let device = || {
        let mut device = CUdevice(-1);
        // SAFETY: the output is a local.
        let code = unsafe { gpu.raw().cuCtxGetDevice(&raw mut device) };
        ok(code, device.0)
    };
    assert_eq!(pop(), Err(201));
    assert_eq!(device(), Err(201));
    assert_eq!([push(first), push(second)], [0, 0]);
    assert_eq!(device(), Ok(1));
    std::thread::scope(|scope| assert_eq!(scope.spawn(|| gpu.current()).join().unwrap(), Ok(0)));
    assert_eq!(gpu.set_current(first), 0, "it replaces the top");
    assert_eq!(device(), Ok(0));
    assert_eq!([pop(), pop()], [Ok(first), Ok(first)]);
    assert_eq!(pop(), Err(201));
    assert_eq!(push(CUcontext::NULL), 1);
    assert_eq!(gpu.set_current(CUcontext::NULL), 0);
}

#[test]
fn streams_events_copies_and_plain_memory_need_a_context() {
    for gpu in Gpu::both() {
        let buffer = gpu.buffer(UNIT);
        let (mut stream, mut event, mut plain) = (CUstream::NULL, CUevent::NULL, CUdeviceptr(0));
        let (mut free, mut total) = (0, 0);
        // SAFETY: the outputs are locals.
        let codes = unsafe {
            [
                gpu.raw().cuStreamCreate(&raw mut stream, CUstream_flags::DEFAULT),
                gpu.raw().cuEventCreate(&raw mut event, CUevent_flags::DEFAULT),
                gpu.raw().cuMemAlloc(&raw mut plain, 1),
                gpu.raw().cuMemGetInfo(&raw mut free, &raw mut total),
                gpu.raw().cuCtxSynchronize(),
                gpu.raw().cuMemsetD8(CUdeviceptr(buffer.address), 0, 1),
            ]
        };
        assert!(codes.iter().all(|code| code.0 == 201), "{codes:?}");
        assert_eq!(gpu.write(buffer.address, b"x"), 201);
        assert_eq!(gpu.range_of(buffer.address), Err(201));
        assert_eq!(gpu.synchronize(CUstream::LEGACY), 201);
    }
}

#[test]
fn mappings_and_grants_outlive_a_reset_and_threads_keep_a_dead_context() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let buffer = gpu.buffer(UNIT);
        let stream = gpu.stream(CUstream_flags::NON_BLOCKING);
        assert_eq!(gpu.fill(buffer.address, 9, 1, stream), 0);
        let mut plain = CUdeviceptr(0);
        // SAFETY: the output is a local.
        assert_eq!(unsafe { gpu.raw().cuMemAlloc(&raw mut plain, 1) }.0, 0);
        // SAFETY: numbers alone.
        assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }.0, 0);
        assert_eq!(gpu.write(buffer.address, b"x"), 709);
        let live = gpu.simulator.live();
        assert_eq!((live.streams, live.plain_allocations, live.mappings), (0, 0, 1));
        gpu.enter(0);
        assert_eq!(gpu.read(buffer.address, 1).unwrap(), [9], "work was done, and the grant holds");
        gpu.close(buffer);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn no_context_follows_one_that_was_broken() {
    let gpu = Gpu::measured().with_context();
    let context = gpu.enter(0);
    let buffer = gpu.buffer(UNIT);
    let stream = gpu.stream(CUstream_flags::NON_BLOCKING);
    let gate = gpu.hold(stream);
    assert_eq!(gpu.fill(buffer.address, 1, 1, stream), 0);
    assert_eq!(gpu.unmap(buffer.address, UNIT), 0);
    gate.open();
    assert_eq!(gpu.synchronize(stream), 719);
    assert_eq!(gpu.enter(0), context, "as long as it is there, it is what others get too");
    // SAFETY: numbers alone.
    assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxReset(CUdevice(0)) }.0, 0);
    assert_eq!(gpu.synchronize(CUstream::LEGACY), 709);
    let mut next = CUcontext::NULL;
    // SAFETY: the output is a local.
    assert_eq!(unsafe { gpu.raw().cuDevicePrimaryCtxRetain(&raw mut next, CUdevice(0)) }.0, 719);
    assert!(!gpu.is_active(0));
    gpu.simulator.mend_devices();
    gpu.enter(0);
    assert_eq!(gpu.synchronize(CUstream::LEGACY), 0);
}

#[test]
fn simulators_are_strangers() {
    let (one, other) = (Gpu::strict(), Gpu::strict());
    one.enter(0);
    assert_eq!(other.current(), Ok(0), "contexts of a thread are each driver's own");
    let handle = one.create(UNIT).unwrap();
    assert_eq!(other.simulator.live().allocations, 0);
    assert_eq!(one.release(handle), 0);
    assert_ne!(one.driver, other.driver);
    let again = Driver::new(one.simulator.clone()).unwrap();
    assert_eq!(again.device_count(), 1);
}

#[test]
fn calls_are_logged_in_order() {
    let gpu = Gpu::strict();
    gpu.simulator.clear_calls();
    let buffer = gpu.buffer(UNIT);
    gpu.close(buffer);
    assert_eq!(
        gpu.simulator.calls(),
        [
            Call::cuMemCreate,
            Call::cuMemAddressReserve,
            Call::cuMemMap,
            Call::cuMemSetAccess,
            Call::cuMemUnmap,
            Call::cuMemAddressFree,
            Call::cuMemRelease,
        ]
    );
    gpu.simulator.clear_calls();
    assert_eq!(gpu.simulator.calls(), []);
}
