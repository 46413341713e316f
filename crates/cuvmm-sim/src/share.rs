//! Exporting memory to other processes, and importing it from them.

use std::os::fd::{AsFd, AsRawFd, IntoRawFd, OwnedFd};
use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;
use rustix::io::Errno;

use crate::create::live_handle;
use crate::latency::Work;
use crate::memory::{self, Found, Memory, MemoryFile};
use crate::profiles::FLUSH_WRITES_OPTIONS;
use crate::session::{Answer, Session};
use crate::state::{Home, end_of};
use crate::{context, fabric};

/// The ordinal of a device that this process can't see.
const HIDDEN: i32 = -2;
/// What the ranges of a dma-buf are multiples of: the host's page.
const PAGE: u64 = 4096;
/// Asks for a dma-buf that is mapped over PCIe, on machines with another way.
const PCIE_MAPPING: u64 = 1;

/// 304 where the machine has no room for so many more open files.
pub(crate) fn room_for_files(session: &mut Session<'_>, more: usize) -> Answer {
    let Some(most) = session.shared.machine.open_files else { return Ok(()) };
    let fits = |files: usize| files.checked_add(more).is_some_and(|files| files <= most);
    // What was closed meanwhile is looked for only where that decides.
    let fits = fits(session.files_given_out()) || fits(session.open_files());
    if fits { Ok(()) } else { Err(CUresult::OPERATING_SYSTEM) }
}

/// Exports as a file descriptor, which is then the caller's to close.
pub(crate) fn export(session: &mut Session<'_>, handle: CUmemGenericAllocationHandle, flags: u64) -> Answer<i32> {
    let memory_id = exportable(session, handle, CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR, flags)?;
    room_for_files(session, 1)?;
    let physical = session.physical.get_mut(&memory_id).ok_or(CUresult::INVALID_VALUE)?;
    let exported = physical.memory.export().ok_or(CUresult::INVALID_VALUE)?;
    let descriptor = exported.map_err(no_descriptor)?;
    physical.exported = true;
    session.takes(Work::Export);
    Ok(give_away(session, descriptor))
}

/// Leaves a descriptor to the caller, and counts it for as long as it is open.
fn give_away(session: &mut Session<'_>, descriptor: OwnedFd) -> i32 {
    if session.shared.machine.open_files.is_some()
        && let Ok(identity) = memory::identity_of(descriptor.as_fd())
    {
        session.given_away.push((descriptor.as_raw_fd(), identity));
    }
    descriptor.into_raw_fd()
}

/// Exports as a fabric handle, which holds nothing by itself.
pub(crate) fn export_fabric(
    session: &mut Session<'_>,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> Answer<CUmemFabricHandle> {
    let memory_id = exportable(session, handle, CUmemAllocationHandleType::FABRIC, flags)?;
    let physical = session.physical.get_mut(&memory_id).ok_or(CUresult::INVALID_VALUE)?;
    let named = physical.memory.file_number().zip(physical.memory.identity());
    let (number, identity) = named.ok_or(CUresult::INVALID_VALUE)?;
    physical.exported = true;
    session.takes(Work::Export);
    Ok(fabric::handle_of(number, identity))
}

/// The memory of a handle, if it was made here and to be exported so.
fn exportable(
    session: &mut Session<'_>,
    handle: CUmemGenericAllocationHandle,
    kind: CUmemAllocationHandleType,
    flags: u64,
) -> Answer<u64> {
    let found = live_handle(session, handle)?;
    let (memory_id, imported) = (found.memory_id, found.imported);
    let physical = session.physical.get(&memory_id).ok_or(CUresult::INVALID_VALUE)?;
    let allowed = physical.memory.properties.requested_handle_types.contains(kind);
    if flags == 0 && !imported && allowed { Ok(memory_id) } else { Err(CUresult::INVALID_VALUE) }
}

fn no_descriptor(error: Errno) -> CUresult {
    match error {
        Errno::MFILE | Errno::NFILE => CUresult::OPERATING_SYSTEM,
        _ => CUresult::UNKNOWN,
    }
}

/// Imports what an exported descriptor stands for.
pub(crate) fn import(session: &mut Session<'_>, os_handle: u64) -> Answer<CUmemGenericAllocationHandle> {
    if os_handle == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let number = i32::try_from(os_handle.cast_signed()).map_err(|_| CUresult::UNKNOWN)?;
    match session.by_file.get(&memory::identity_by_number(number)?) {
        // What is known here needs no file of its own, not even for a moment.
        Some(&memory_id) => Ok(take(session, memory_id)),
        None => adopt(session, &memory::find(number)?),
    }
}

/// Imports what a fabric handle names.
pub(crate) fn import_fabric(
    session: &mut Session<'_>,
    handle: &CUmemFabricHandle,
) -> Answer<CUmemGenericAllocationHandle> {
    adopt(session, &fabric::find(handle)?)
}

/// 801 without a channel to other machines.
pub(crate) fn has_fabric(session: &Session<'_>) -> Answer {
    if session.shared.machine.imex { Ok(()) } else { Err(CUresult::NOT_SUPPORTED) }
}

/// Makes a handle for memory that was found.
fn adopt(session: &mut Session<'_>, found: &Found) -> Answer<CUmemGenericAllocationHandle> {
    if let Some(&memory_id) = session.by_file.get(&found.identity) {
        return Ok(take(session, memory_id));
    }
    let mut location = found.location();
    if location.location_type == CUmemLocationType::DEVICE {
        location.id = match session.shared.machine.ordinal_of(found.uuid()) {
            Some(ordinal) => ordinal,
            None if session.policy.hidden_memory_imports => HIDDEN,
            None => return Err(CUresult::INVALID_DEVICE),
        };
    }
    let mut properties = CUmemAllocationProp::pinned(location, CUmemAllocationHandleType::NONE);
    properties.alloc_flags.compression_type = found.compression();
    let memory = Memory::imported(found, properties).map_err(|_| CUresult::OUT_OF_MEMORY)?;
    // Memory that was made here, and that only a descriptor held, is counted here as long as it lives.
    let memory_id = session.add_physical(Arc::new(memory), Home::Foreign);
    Ok(take(session, memory_id))
}

/// Makes a handle for memory that is known here.
fn take(session: &mut Session<'_>, memory_id: u64) -> CUmemGenericAllocationHandle {
    session.takes(Work::Import);
    session.add_handle(memory_id, true)
}

/// Makes a descriptor that holds the memory of an address range, as a dma-buf does: for devices and drivers of other
/// makers. There are none of them here, so that is all it does; the bytes can't be reached through it.
pub(crate) fn dma_buf(
    session: &mut Session<'_>,
    address: CUdeviceptr,
    size: usize,
    kind: CUmemRangeHandleType,
    flags: u64,
) -> Answer<i32> {
    context::current(session)?;
    let is_of_pages = |number: u64| number.is_multiple_of(PAGE);
    if kind != CUmemRangeHandleType::DMA_BUF_FD || size == 0 || !is_of_pages(address.0) || !is_of_pages(size as u64) {
        return Err(CUresult::INVALID_VALUE);
    }
    let memories = memories_of(session, address, size)?;
    let location = properties_of_all(session, &memories)?.location;
    if location.location_type != CUmemLocationType::DEVICE {
        return Err(CUresult::INVALID_VALUE);
    }
    match flags {
        0 if session.shared.device_has(location.id, CUdevice_attribute::DMA_BUF_SUPPORTED) => {}
        0 | PCIE_MAPPING if session.shared.machine.driver_version.0 >= 12080 || flags == 0 => {
            return Err(CUresult::NOT_SUPPORTED);
        }
        _ => return Err(CUresult::INVALID_VALUE),
    }
    room_for_files(session, 2)?;
    let file = MemoryFile::empty().map_err(no_descriptor)?;
    let descriptor = file.open_again().map_err(no_descriptor)?;
    session.pin(file, memories);
    Ok(give_away(session, descriptor))
}

/// The memories behind a range, in order; 1 where there is a hole.
fn memories_of(session: &Session<'_>, address: CUdeviceptr, size: usize) -> Answer<Vec<u64>> {
    let end = end_of(address, size)?;
    let mut at = address.0;
    let mut memories = Vec::new();
    while at < end {
        let (start, mapping) = session.mapping_at(at).ok_or(CUresult::INVALID_VALUE)?;
        memories.push(mapping.memory_id);
        at = start + mapping.bytes;
    }
    Ok(memories)
}

/// The properties of all of these; 1 if they differ.
fn properties_of_all(session: &Session<'_>, memories: &[u64]) -> Answer<CUmemAllocationProp> {
    let mut all = memories.iter().filter_map(|id| session.physical.get(id)).map(|found| found.memory.properties);
    let first = all.next().ok_or(CUresult::INVALID_VALUE)?;
    if all.all(|other| other == first) { Ok(first) } else { Err(CUresult::INVALID_VALUE) }
}

/// Lets nothing go by: other devices write into memory here only when the host does, which is over when it is.
pub(crate) fn flush(
    session: &mut Session<'_>,
    target: CUflushGPUDirectRDMAWritesTarget,
    scope: CUflushGPUDirectRDMAWritesScope,
) -> Answer {
    let context = context::working(session)?;
    let scopes = [CUflushGPUDirectRDMAWritesScope::TO_OWNER, CUflushGPUDirectRDMAWritesScope::TO_ALL_DEVICES];
    if target != CUflushGPUDirectRDMAWritesTarget::CURRENT_CTX || !scopes.contains(&scope) {
        return Err(CUresult::INVALID_VALUE);
    }
    let device = context::device_of(session, context);
    if session.shared.device_has(device, FLUSH_WRITES_OPTIONS) { Ok(()) } else { Err(CUresult::NOT_SUPPORTED) }
}
