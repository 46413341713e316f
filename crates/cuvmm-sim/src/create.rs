//! Making physical memory, and handles to it.

use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;
use rustix::io::Errno;

use crate::latency::Work;
use crate::memory::{MOST_BYTES, Memory};
use crate::session::{Answer, Session};
use crate::share::room_for_files;
use crate::state::{Handle, Home};

const POSIX: u32 = CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR.0;
const WINDOWS: u32 = CUmemAllocationHandleType::WIN32.0 | CUmemAllocationHandleType::WIN32_KMT.0;
const FABRIC: u32 = CUmemAllocationHandleType::FABRIC.0;
/// Tile pools, hardware decompression, RDMA over PCIe: each with the driver's version that knows it.
const USAGES: [(u16, i32); 3] = [(0b1, 0), (0b10, 12080), (0b100, 13040)];

pub(crate) fn create(
    session: &mut Session<'_>,
    size: usize,
    properties: CUmemAllocationProp,
    flags: u64,
) -> Answer<CUmemGenericAllocationHandle> {
    if flags != 0 || properties.allocation_type != CUmemAllocationType::PINNED {
        return Err(CUresult::INVALID_VALUE);
    }
    let home = home_of(session, &properties)?;
    check_handle_types(session, properties.requested_handle_types, home)?;
    check_flags(session, properties.alloc_flags, home)?;
    let unit = granularity_of(session, &properties, CUmemAllocationGranularity_flags::MINIMUM);
    if size == 0 || !size.is_multiple_of(unit) {
        return Err(CUresult::INVALID_VALUE);
    }
    claim(session, home, size)?;
    if is_exportable(&properties) {
        room_for_files(session, 1)?;
    }
    let mut properties = properties;
    properties.alloc_flags.usage &= known_usages(session);
    if properties.alloc_flags.gpu_direct_rdma_capable != 0 || !session.shared.machine.compresses {
        properties.alloc_flags.compression_type = 0;
    }
    if let Home::Node(node) = home
        && session.policy.host_reads_as_numa
        && properties.location.location_type == CUmemLocationType::HOST
    {
        properties.location = CUmemLocation::host_numa(node);
    }
    let memory = make(session, size, properties, home)?;
    let memory_id = session.add_physical(Arc::new(memory), home);
    session.takes(Work::Create { bytes: size as u64, host: !matches!(home, Home::Device(_)) });
    Ok(session.add_handle(memory_id, false))
}

/// Answers 2 where there is not so much memory left.
pub(crate) fn claim(session: &mut Session<'_>, home: Home, size: usize) -> Answer {
    let machine = &session.shared.machine;
    let total = match home {
        Home::Device(ordinal) => machine.device(ordinal).map_or(0, |device| device.total_memory),
        Home::Node(node) => machine.node_memory(node).unwrap_or(0),
        Home::Foreign => usize::MAX,
    };
    if size <= MOST_BYTES && session.has_room(home, size, total) { Ok(()) } else { Err(CUresult::OUT_OF_MEMORY) }
}

/// Makes the bytes. Device memory is poisoned; the host's is zero, as the kernel hands it out.
pub(crate) fn make(session: &Session<'_>, size: usize, properties: CUmemAllocationProp, home: Home) -> Answer<Memory> {
    let machine = &session.shared.machine;
    let (mask, uuid) = match home {
        Home::Device(ordinal) => {
            (machine.poison.unwrap_or(0), machine.device(ordinal).map(|device| device.uuid).unwrap_or_default())
        }
        _ => (0, CUuuid::default()),
    };
    let made = if is_exportable(&properties) {
        Memory::exportable(size, properties, mask, uuid)
    } else {
        Memory::new(size, properties, mask)
    };
    made.map_err(|error| match error {
        Errno::MFILE | Errno::NFILE | Errno::FBIG => CUresult::OPERATING_SYSTEM,
        _ => CUresult::OUT_OF_MEMORY,
    })
}

fn is_exportable(properties: &CUmemAllocationProp) -> bool {
    properties.requested_handle_types.0 & (POSIX | FABRIC) != 0
}

/// Where memory of these properties is made.
fn home_of(session: &Session<'_>, properties: &CUmemAllocationProp) -> Answer<Home> {
    let machine = &session.shared.machine;
    let id = properties.location.id;
    match properties.location.location_type {
        CUmemLocationType::DEVICE => match machine.device(id) {
            Some(_) => Ok(Home::Device(id)),
            None => Err(CUresult::INVALID_DEVICE),
        },
        CUmemLocationType::HOST => {
            let attribute = CUdevice_attribute::HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
            let refused = machine.driver_version.0 < 13000
                || properties.requested_handle_types != CUmemAllocationHandleType::NONE;
            match (refused, session.shared.any_device_has(attribute)) {
                (true, _) => Err(CUresult::INVALID_VALUE),
                (false, false) => Err(CUresult::NOT_SUPPORTED),
                (false, true) => Ok(Home::Node(machine.first_node())),
            }
        }
        CUmemLocationType::HOST_NUMA if machine.driver_version.0 >= 12020 => {
            let attribute = CUdevice_attribute::HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
            // Older drivers have no attribute that would tell.
            let told = machine.driver_version.0 >= 12090;
            match machine.node_memory(id) {
                None => Err(CUresult::INVALID_VALUE),
                Some(_) if told && !session.shared.any_device_has(attribute) => Err(CUresult::NOT_SUPPORTED),
                Some(_) => Ok(Home::Node(id)),
            }
        }
        _ => Err(CUresult::INVALID_VALUE),
    }
}

fn check_handle_types(session: &Session<'_>, kinds: CUmemAllocationHandleType, home: Home) -> Answer {
    let has = |attribute| match home {
        Home::Device(ordinal) => session.shared.device_has(ordinal, attribute),
        _ => session.shared.any_device_has(attribute),
    };
    if kinds.0 & WINDOWS != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    if kinds.0 & !(POSIX | WINDOWS | FABRIC) != 0 && !session.policy.unknown_handle_types {
        return Err(CUresult::NOT_SUPPORTED);
    }
    if kinds.0 & POSIX != 0 && !has(CUdevice_attribute::HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED) {
        return Err(CUresult::NOT_SUPPORTED);
    }
    if kinds.0 & FABRIC != 0 {
        if !has(CUdevice_attribute::HANDLE_TYPE_FABRIC_SUPPORTED) {
            return Err(CUresult::NOT_SUPPORTED);
        }
        if !session.shared.machine.imex {
            return Err(CUresult::NOT_PERMITTED);
        }
    }
    Ok(())
}

fn known_usages(session: &Session<'_>) -> u16 {
    let version = session.shared.machine.driver_version.0;
    USAGES.iter().filter(|&&(_, since)| version >= since).fold(0, |known, &(usage, _)| known | usage)
}

fn check_flags(session: &Session<'_>, flags: CUmemAllocationPropFlags, home: Home) -> Answer {
    let has = |attribute| match home {
        Home::Device(ordinal) => session.shared.device_has(ordinal, attribute),
        _ => session.shared.any_device_has(attribute),
    };
    let unknown_usage = flags.usage & !known_usages(session) != 0 && !session.policy.unknown_usages;
    if flags.compression_type > 1 || unknown_usage || flags.reserved != [0; 4] {
        return Err(CUresult::INVALID_VALUE);
    }
    if matches!(home, Home::Node(_)) && (flags.compression_type != 0 || flags.gpu_direct_rdma_capable != 0) {
        return Err(CUresult::INVALID_VALUE);
    }
    let compresses = flags.compression_type == 0 || has(CUdevice_attribute::GENERIC_COMPRESSION_SUPPORTED);
    let reaches =
        flags.gpu_direct_rdma_capable == 0 || has(CUdevice_attribute::GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    if compresses && reaches { Ok(()) } else { Err(CUresult::NOT_SUPPORTED) }
}

fn granularity_of(
    session: &Session<'_>,
    properties: &CUmemAllocationProp,
    option: CUmemAllocationGranularity_flags,
) -> usize {
    (session.shared.machine.granularity)(properties, option).max(4096)
}

pub(crate) fn granularity(
    session: &Session<'_>,
    properties: CUmemAllocationProp,
    option: CUmemAllocationGranularity_flags,
) -> Answer<usize> {
    match option {
        CUmemAllocationGranularity_flags::MINIMUM | CUmemAllocationGranularity_flags::RECOMMENDED => {
            Ok(granularity_of(session, &properties, option))
        }
        _ => Err(CUresult::INVALID_VALUE),
    }
}

/// The least granularity of memory that exists.
pub(crate) fn unit_of(session: &Session<'_>, memory: &Memory) -> u64 {
    granularity_of(session, &memory.properties, CUmemAllocationGranularity_flags::MINIMUM) as u64
}

/// A handle that can be used. One without references is undefined: noted, and of use at most where a mapping still
/// keeps it.
pub(crate) fn live_handle<'a>(
    session: &'a mut Session<'_>,
    handle: CUmemGenericAllocationHandle,
) -> Answer<&'a mut Handle> {
    if handle.0 == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let lives = session.policy.released_handle_lives;
    if session.handles.get(&handle.0).is_none_or(|found| found.references == 0) {
        session.violation(format!("handle {:#x} is not alive", handle.0));
    }
    let found = session.handles.get_mut(&handle.0).filter(|found| found.references > 0 || lives);
    found.ok_or(CUresult::INVALID_VALUE)
}

pub(crate) fn release(session: &mut Session<'_>, handle: CUmemGenericAllocationHandle) -> Answer {
    let found = live_handle(session, handle)?;
    found.references = found.references.checked_sub(1).ok_or(CUresult::INVALID_VALUE)?;
    session.settle_handle(handle.0);
    Ok(())
}

pub(crate) fn retain(session: &mut Session<'_>, address: u64) -> Answer<CUmemGenericAllocationHandle> {
    let handle = session.virtual_mapping_at(address).and_then(|(_, mapping)| mapping.handle);
    let value = handle.ok_or(CUresult::INVALID_VALUE)?;
    if let Some(handle) = session.handles.get_mut(&value) {
        handle.references += 1;
    }
    Ok(CUmemGenericAllocationHandle(value))
}

pub(crate) fn properties(
    session: &mut Session<'_>,
    handle: CUmemGenericAllocationHandle,
) -> Answer<CUmemAllocationProp> {
    let found = live_handle(session, handle).map(|found| (found.memory_id, found.imported));
    let told = match found {
        Ok((memory_id, imported)) => {
            session.physical.get(&memory_id).map(|physical| properties_by(&physical.memory, imported))
        }
        Err(_) if session.policy.gone_handle_tells => session.gone.properties(handle.0),
        Err(_) => None,
    };
    told.ok_or(CUresult::INVALID_VALUE)
}

/// What a handle says of its memory: an imported one names, of flags and handle types, compression alone.
pub(crate) fn properties_by(memory: &Memory, imported: bool) -> CUmemAllocationProp {
    let made = memory.properties;
    if !imported {
        return made;
    }
    let mut properties = CUmemAllocationProp::pinned(made.location, CUmemAllocationHandleType::NONE);
    properties.alloc_flags.compression_type = made.alloc_flags.compression_type;
    properties
}
