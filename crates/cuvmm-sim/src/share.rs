//! Exporting memory to other processes, and importing it from them.

use std::os::fd::IntoRawFd;
use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;
use rustix::io::Errno;

use crate::create::live_handle;
use crate::memory::{self, Memory};
use crate::session::{Answer, Session};
use crate::state::Home;

/// The ordinal of a device that this process can't see.
const HIDDEN: i32 = -2;

/// Exports as a file descriptor, which is then the caller's to close.
pub(crate) fn export(
    session: &mut Session<'_>,
    handle: CUmemGenericAllocationHandle,
    kind: CUmemAllocationHandleType,
    flags: u64,
) -> Answer<i32> {
    let found = live_handle(session, handle)?;
    let (memory_id, imported) = (found.memory_id, found.imported);
    let physical = session.physical.get_mut(&memory_id).ok_or(CUresult::INVALID_VALUE)?;
    let allowed = physical.memory.properties.requested_handle_types;
    if flags != 0 || imported || !kind.0.is_power_of_two() || !allowed.contains(kind) {
        return Err(CUresult::INVALID_VALUE);
    }
    if kind != CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let exported = physical.memory.export().ok_or(CUresult::INVALID_VALUE)?;
    let descriptor = exported.map_err(|error| match error {
        Errno::MFILE | Errno::NFILE => CUresult::OPERATING_SYSTEM,
        _ => CUresult::UNKNOWN,
    })?;
    physical.exported = true;
    Ok(descriptor.into_raw_fd())
}

/// Imports what an exported descriptor stands for.
pub(crate) fn import(
    session: &mut Session<'_>,
    os_handle: u64,
    kind: CUmemAllocationHandleType,
) -> Answer<CUmemGenericAllocationHandle> {
    match kind {
        CUmemAllocationHandleType::POSIX_FILE_DESCRIPTOR => {}
        CUmemAllocationHandleType::FABRIC => return Err(CUresult::NOT_SUPPORTED),
        _ => return Err(CUresult::INVALID_VALUE),
    }
    if os_handle == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let number = i32::try_from(os_handle.cast_signed()).map_err(|_| CUresult::UNKNOWN)?;
    let found = memory::find(number)?;
    let known = session
        .physical
        .iter()
        .find(|(_, physical)| physical.memory.identity() == Some(found.identity))
        .map(|(&id, _)| id);
    if let Some(memory_id) = known {
        return Ok(session.add_handle(memory_id, true));
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
    properties.alloc_flags = found.flags();
    let memory = Memory::imported(&found, properties).map_err(|_| CUresult::OUT_OF_MEMORY)?;
    // Memory that was made here, and that only a descriptor held, is counted here as long as it lives.
    let memory_id = session.add_physical(Arc::new(memory), Home::Foreign);
    Ok(session.add_handle(memory_id, true))
}
