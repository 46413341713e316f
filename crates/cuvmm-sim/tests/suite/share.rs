//! Exporting and importing within a process: rules R74 to R82. Between processes: `tests/processes.rs`.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use cuvmm_driver::sys::*;
use cuvmm_sim::{Machine, Preset};

use crate::common::{Gpu, UNIT, code_of, device_memory, ok, read_write};

const POSIX: CUmemAllocationHandleType = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;

fn export_with(gpu: &Gpu, handle: u64, kind: u32, flags: u64) -> Result<i32, u32> {
    let mut number = -1_i32;
    let (handle, kind) = (CUmemGenericAllocationHandle(handle), CUmemAllocationHandleType(kind));
    // SAFETY: the output is a C int of ours.
    let code = unsafe { gpu.raw().cuMemExportToShareableHandle((&raw mut number).cast(), handle, kind, flags) };
    ok(code, number)
}

fn import_with(gpu: &Gpu, number: isize, kind: u32) -> Result<u64, u32> {
    let mut handle = CUmemGenericAllocationHandle(0);
    let os_handle = std::ptr::without_provenance_mut(number.cast_unsigned());
    let kind = CUmemAllocationHandleType(kind);
    // SAFETY: the output is ours; the number is passed as the pointer.
    let code = unsafe { gpu.raw().cuMemImportFromShareableHandle(&raw mut handle, os_handle, kind) };
    ok(code, handle.0)
}

#[test]
fn only_what_was_asked_for_at_create_is_exported() {
    for gpu in Gpu::both() {
        let exportable = gpu.create_exportable(UNIT);
        let plain = gpu.create(UNIT).unwrap();
        for (handle, kind, flags) in
            [(plain, 1, 0), (exportable, 1, 1), (exportable, 0, 0), (exportable, 8, 0), (exportable, 9, 0), (0, 1, 0)]
        {
            assert_eq!(export_with(&gpu, handle, kind, flags), Err(1), "{kind} {flags}");
        }
        let kind = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR;
        let handle = CUmemGenericAllocationHandle(exportable);
        // SAFETY: null is what is asked about.
        assert_eq!(unsafe { gpu.raw().cuMemExportToShareableHandle(std::ptr::null_mut(), handle, kind, 0) }.0, 1);
        assert_eq!(gpu.violations(), [""; 0]);
    }
}

#[test]
fn each_export_is_a_new_descriptor_that_closes_on_exec_and_hides_the_size() {
    for gpu in Gpu::both() {
        let (small, large) = (gpu.create_exportable(UNIT), gpu.create_exportable(8 * UNIT));
        let (one, two, other) = (gpu.export(small).unwrap(), gpu.export(small).unwrap(), gpu.export(large).unwrap());
        assert_ne!(one.as_raw_fd(), two.as_raw_fd());
        assert!(rustix::io::fcntl_getfd(&one).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
        let size = |fd: &OwnedFd| rustix::fs::fstat(fd).unwrap().st_size;
        assert_eq!(size(&one), size(&other));
        assert!(rustix::fs::ftruncate(&one, 4096).is_err(), "nobody can shrink it under others");
        assert!(rustix::fs::ftruncate(&one, 1 << 50).is_err());
    }
}

#[test]
fn an_import_in_the_same_process_is_another_handle_to_the_same_memory() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let first = gpu.create_exportable(UNIT);
        let fd = gpu.export(first).unwrap();
        let second = gpu.import(&fd).unwrap();
        let third = gpu.import(&fd).unwrap();
        assert!(rustix::io::fcntl_getfd(&fd).is_ok(), "the descriptor stays the caller's");
        drop(fd);
        assert!(first != second && second != third);
        let (a, b) = (gpu.buffer_of(first, UNIT), gpu.buffer_of(second, UNIT));
        assert_eq!(gpu.write(a.address, b"one memory"), 0);
        assert_eq!(gpu.read(b.address, 10).unwrap(), b"one memory");
        assert_eq!(gpu.simulator.physical_bytes(0), UNIT, "counted once");
        assert_eq!(gpu.simulator.live().imported, 2);
        assert_eq!(gpu.retain(b.address), Ok(second), "the value of that mapping");
        for handle in [first, second, second, third] {
            assert_eq!(gpu.release(handle), 0);
        }
    }
}

#[test]
fn an_imported_handle_says_where_it_is_and_is_not_exported_again() {
    for gpu in Gpu::both() {
        let handle = gpu.create_exportable(UNIT);
        let imported = gpu.import(&gpu.export(handle).unwrap()).unwrap();
        let properties = gpu.properties(imported).unwrap();
        assert_eq!(properties.location, CUmemLocation::device(0));
        assert_eq!(properties.requested_handle_types.0, 0);
        assert_eq!(gpu.properties(handle).unwrap().requested_handle_types, POSIX);
        assert_eq!(gpu.export(imported).unwrap_err(), 1);
        let address = gpu.reserve(4 * UNIT, 0, 0).unwrap();
        assert_eq!(gpu.map(address, 2 * UNIT, imported), 801, "the size shows at the map");
        assert_eq!(gpu.map(address, UNIT, imported), 0);
    }
}

#[test]
fn an_imported_handle_names_compression_alone_of_the_flags_it_was_made_with() {
    let compressed = CUmemAllocationPropFlags { compression_type: 1, usage: 1, ..Default::default() };
    let for_rdma = CUmemAllocationPropFlags { gpu_direct_rdma_capable: 1, usage: 1, ..Default::default() };
    for (alloc_flags, compression_type) in [(compressed, 1), (for_rdma, 0)] {
        let told = CUmemAllocationPropFlags { compression_type, ..Default::default() };
        let (maker, user) = (Gpu::strict(), Gpu::strict());
        let handle = maker.create_as(UNIT, &CUmemAllocationProp { alloc_flags, ..device_memory(0, POSIX) }).unwrap();
        let imported = user.import(&maker.export(handle).unwrap()).unwrap();
        assert_eq!(user.properties(imported).unwrap().alloc_flags, told);
        let own = maker.import(&maker.export(handle).unwrap()).unwrap();
        assert_eq!(maker.properties(own).unwrap().alloc_flags, told);
        assert_eq!(maker.properties(handle).unwrap().alloc_flags, alloc_flags);
    }
}

#[test]
fn two_simulators_share_what_one_exports() {
    for preset in [Preset::Strict, Preset::Measured] {
        let (maker, user) = (Gpu::new(Machine::h200().preset(preset)), Gpu::new(Machine::h200().poison(None)));
        let handle = maker.create_exportable(UNIT);
        let fd = maker.export(handle).unwrap();
        let imported = user.import(&fd).unwrap();
        drop(fd);
        let maker = maker.with_context();
        let there = maker.buffer_of(handle, UNIT);
        assert_eq!(maker.write(there.address, b"across"), 0);
        maker.close(there);
        assert_eq!(maker.simulator.physical_bytes(0), UNIT, "an importer holds it");
        let user = user.with_context();
        let here = user.buffer_of(imported, UNIT);
        assert_eq!(user.read(here.address, 7).unwrap(), b"across\xA5", "the maker's poison is seen as the maker's");
        assert_eq!(user.simulator.physical_bytes(0), 0, "counted where it was made");
        user.close(here);
        assert_eq!(maker.simulator.physical_bytes(0), 0);
        assert!(maker.simulator.live().device_bytes.is_empty());
    }
}

#[test]
fn an_open_descriptor_pins_the_memory() {
    for gpu in Gpu::both() {
        let gpu = gpu.with_context();
        let handle = gpu.create_exportable(UNIT);
        let buffer = gpu.buffer_of(handle, UNIT);
        assert_eq!(gpu.write(buffer.address, b"pinned"), 0);
        let fd = gpu.export(handle).unwrap();
        let sent_on = fd.try_clone().unwrap();
        gpu.close(buffer);
        drop(fd);
        let (free, total) = gpu.memory();
        assert_eq!(total - free, UNIT, "a copy of the descriptor is open");
        let buffer = gpu.buffer_of(gpu.import(&sent_on).unwrap(), UNIT);
        drop(sent_on);
        assert_eq!(gpu.read(buffer.address, 6).unwrap(), b"pinned");
        assert_eq!(gpu.simulator.physical_bytes(0), UNIT);
        gpu.close(buffer);
        assert_eq!(gpu.memory().0, total);
    }
}

#[test]
fn what_is_no_exported_descriptor_is_not_imported() {
    let foreign = rustix::fs::memfd_create("foreign", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&foreign, 1 << 46).unwrap();
    let sealed = rustix::fs::memfd_create("sealed", rustix::fs::MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&sealed, 1 << 46).unwrap();
    let seals = rustix::fs::SealFlags::SHRINK | rustix::fs::SealFlags::GROW | rustix::fs::SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&sealed, seals).unwrap();
    let null = File::open("/dev/null").unwrap();
    for gpu in Gpu::both() {
        for fd in [foreign.as_raw_fd(), sealed.as_raw_fd(), null.as_raw_fd(), -1, i32::MAX] {
            assert_eq!(import_with(&gpu, fd as isize, 1), Err(999), "{fd}");
        }
        let fd = gpu.export(gpu.create_exportable(UNIT)).unwrap();
        let number = fd.as_raw_fd() as isize;
        for (number, kind, code) in [(number, 8, 801), (number, 2, 801), (number, 0, 1), (number, 3, 1), (0, 1, 1)] {
            assert_eq!(import_with(&gpu, number, kind), Err(code), "{kind}");
        }
        assert_eq!(gpu.simulator.live().imported, 0);
    }
}

#[test]
fn a_lying_header_is_refused() {
    let gpu = Gpu::strict();
    let fd = gpu.export(gpu.create_exportable(UNIT)).unwrap();
    let header = (1 << 46) - 4096;
    let mut bytes = [0; 64];
    assert_eq!(rustix::io::pread(&fd, &mut bytes, header).unwrap(), 64);
    for size in [0_u64, 1, 4097, 1 << 46, u64::MAX] {
        let other = gpu.export(gpu.create_exportable(UNIT)).unwrap();
        let mut lie = bytes;
        lie[24..32].copy_from_slice(&size.to_le_bytes());
        rustix::io::pwrite(&other, &lie, header).unwrap();
        let elsewhere = Gpu::strict();
        assert_eq!(elsewhere.import(&other), Err(999), "{size:#x}");
    }
    for location in [0_u32, 2, 4, 5, u32::MAX] {
        let other = gpu.export(gpu.create_exportable(UNIT)).unwrap();
        let mut lie = bytes;
        lie[48..52].copy_from_slice(&location.to_le_bytes());
        rustix::io::pwrite(&other, &lie, header).unwrap();
        assert_eq!(Gpu::strict().import(&other), Err(999), "a location of type {location}");
    }
}

#[test]
fn memory_of_a_hidden_device_is_refused_or_usable_and_says_minus_two() {
    let pair = Machine::h200_pair();
    let maker = Gpu::new(pair.clone());
    let handle = maker.create_as(UNIT, &device_memory(1, POSIX)).unwrap();
    let fd = maker.export(handle).unwrap();
    // Of the same two devices, numbered differently, and with the second one alone hidden.
    let renumbered = Gpu::new(pair.clone().visible(&[1, 0]));
    let location = renumbered.properties(renumbered.import(&fd).unwrap()).unwrap().location;
    assert_eq!(location, CUmemLocation::device(0));
    assert_eq!(Gpu::new(pair.clone().visible(&[0])).import(&fd), Err(101));
    let hidden = Gpu::new(pair.visible(&[0]).preset(Preset::Measured)).with_context();
    let imported = hidden.import(&fd).unwrap();
    assert_eq!(hidden.properties(imported).unwrap().location, CUmemLocation::device(-2));
    let buffer = hidden.buffer_of(imported, UNIT);
    assert_eq!(hidden.grant(buffer.address, UNIT, &[read_write(0)]), 0);
    assert_eq!(hidden.read(buffer.address, 1).unwrap(), [0xA5]);
}

fn with_channel() -> Gpu {
    Gpu::new(Machine::h200_pair().with_imex())
}

const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::FABRIC;
const BOTH: CUmemAllocationHandleType = CUmemAllocationHandleType(1 | 8);

fn export_fabric(gpu: &Gpu, handle: u64) -> Result<CUmemFabricHandle, u32> {
    // SAFETY: the simulator looks the handle up.
    unsafe { gpu.driver.mem_export_fabric(CUmemGenericAllocationHandle(handle)) }.map_err(code_of)
}

fn import_fabric(gpu: &Gpu, shared: &CUmemFabricHandle) -> Result<u64, u32> {
    // SAFETY: it is a handle of 64 bytes.
    unsafe { gpu.driver.mem_import_fabric(shared) }.map(|handle| handle.0).map_err(code_of)
}

#[test]
fn a_fabric_handle_names_the_same_memory() {
    for kinds in [FABRIC, BOTH] {
        let (maker, other) = (with_channel().with_context(), with_channel());
        let buffer = maker.buffer_of(maker.create_as(UNIT, &device_memory(1, kinds)).unwrap(), UNIT);
        let shared = export_fabric(&maker, buffer.handle).unwrap();
        assert_eq!(maker.write(buffer.address, b"here"), 0);
        let own = import_fabric(&maker, &shared).unwrap();
        assert_ne!(own, buffer.handle);
        assert_eq!(maker.release(own), 0);
        let imported = import_fabric(&other, &shared).unwrap();
        let properties = other.properties(imported).unwrap();
        assert_eq!((properties.location, properties.requested_handle_types.0), (CUmemLocation::device(1), 0));
        assert_eq!(export_fabric(&other, imported).err(), Some(1), "an import can't be exported again");
        maker.close(buffer);
        assert_eq!(maker.simulator.physical_bytes(1), UNIT, "an importer holds it");
        other.enter(1);
        let seen = other.buffer_of(imported, UNIT);
        assert_eq!(other.grant(seen.address, UNIT, &[read_write(1)]), 0);
        assert_eq!(other.read(seen.address, 4).unwrap(), b"here");
        other.close(seen);
        assert_eq!(maker.simulator.physical_bytes(1), 0);
    }
}

#[test]
fn a_fabric_handle_by_itself_holds_nothing() {
    let (maker, other) = (with_channel(), with_channel());
    let handle = maker.create_as(UNIT, &device_memory(0, FABRIC)).unwrap();
    let shared = export_fabric(&maker, handle).unwrap();
    assert_eq!(maker.release(handle), 0);
    assert_eq!(maker.simulator.physical_bytes(0), 0);
    // Whatever has the number of its descriptor now.
    let _next = maker.create_as(UNIT, &device_memory(0, FABRIC)).unwrap();
    assert_eq!(import_fabric(&other, &shared), Err(1));
    assert!(maker.violations().is_empty() && other.violations().is_empty());
}

#[test]
fn only_a_fabric_handle_of_a_memory_is_imported_as_one() {
    let gpu = with_channel();
    let handle = gpu.create_as(UNIT, &device_memory(0, BOTH)).unwrap();
    let shared = export_fabric(&gpu, handle).unwrap();
    assert_eq!(import_with(&gpu, 0, 8), Err(1), "null");
    assert_eq!(import_fabric(&gpu, &CUmemFabricHandle::default()), Err(1));
    let number = File::open("/dev/null").unwrap();
    for (at, bytes) in [
        (0, &b"x"[..]),
        (16, &0_u32.to_le_bytes()),
        (16, &u32::MAX.to_le_bytes()),
        (20, &number.as_raw_fd().to_le_bytes()),
        (20, &u32::MAX.to_le_bytes()),
        (24, &u64::MAX.to_le_bytes()),
        (32, &u64::MAX.to_le_bytes()),
    ] {
        let mut lie = shared;
        lie.data[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(import_fabric(&gpu, &lie), Err(1), "{bytes:?} at {at}");
    }
    assert!(import_fabric(&gpu, &shared).is_ok());
    let posix = gpu.create_exportable(UNIT);
    assert_eq!(export_fabric(&gpu, posix).err(), Some(1), "not asked for at create");
    let fabric = gpu.create_as(UNIT, &device_memory(0, FABRIC)).unwrap();
    assert_eq!(gpu.export(fabric).err(), Some(1), "not asked for at create");
    assert_eq!(export_with(&gpu, handle, 9, 0), Err(1), "one kind at a time");
}

#[test]
fn without_a_channel_there_are_no_fabric_handles() {
    let shared = {
        let gpu = with_channel();
        export_fabric(&gpu, gpu.create_as(UNIT, &device_memory(0, FABRIC)).unwrap()).unwrap()
    };
    for gpu in Gpu::both() {
        assert_eq!(gpu.create_as(UNIT, &device_memory(0, FABRIC)), Err(800));
        assert_eq!(gpu.create_as(UNIT, &device_memory(0, BOTH)), Err(800));
        assert_eq!(import_fabric(&gpu, &shared), Err(801));
    }
}
