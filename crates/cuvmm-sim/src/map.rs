//! Mapping and unmapping.

use std::collections::BTreeMap;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::create::{live_handle, unit_of};
use crate::latency::Work;
use crate::session::{Answer, Session};
use crate::space;
use crate::state::{Grantee, Mapping, end_of};

pub(crate) fn map(
    session: &mut Session<'_>,
    address: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64,
) -> Answer {
    if flags != 0 || size == 0 || address.0 == 0 || handle.0 == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let memory_id = live_handle(session, handle)?.memory_id;
    let memory = session.physical.get(&memory_id).ok_or(CUresult::INVALID_VALUE)?.memory.clone();
    if offset != 0 || size != memory.bytes() {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let (start, end) = (address.0, end_of(address, size)?);
    let reserved = if session.policy.map_leaves_reservation {
        session.virtual_reservation_at(start).is_some()
    } else {
        session.in_one_reservation(start, end)
    };
    if !reserved
        || !start.is_multiple_of(unit_of(session, &memory))
        || session.mappings_over(start, end).next().is_some()
    {
        return Err(CUresult::INVALID_VALUE);
    }
    let buffer_id = session.number();
    if let Some(found) = session.handles.get_mut(&handle.0) {
        found.mappings += 1;
    }
    let mapping = Mapping {
        bytes: size as u64,
        handle: Some(handle.0),
        memory_id,
        memory,
        access: BTreeMap::new(),
        buffer_id,
        plain: None,
    };
    session.mappings.insert(start, mapping);
    session.takes(Work::Map { bytes: size as u64 });
    Ok(())
}

pub(crate) fn unmap(session: &mut Session<'_>, address: CUdeviceptr, size: usize) -> Answer {
    if size == 0 || address.0 == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let start = address.0;
    let end = match end_of(address, size) {
        Err(_) if session.policy.unmap_over_holes && is_known(session, start) => return Ok(()),
        end => end?,
    };
    let starts = session.whole_mappings(start, end).ok_or(CUresult::INVALID_VALUE)?;
    let policy = session.policy;
    let covered =
        if policy.unmap_over_holes { is_known(session, start) } else { session.without_hole(&starts, start, end) };
    let one = policy.unmap_across_reservations || session.in_one_reservation(start, end);
    if !covered || !one {
        return Err(CUresult::INVALID_VALUE);
    }
    if session.is_in_use(start, end) {
        session.violation("unmap under queued work");
    }
    for start in starts {
        let bytes = session.mappings.get(&start).map_or(0, |mapping| mapping.bytes);
        session.takes(Work::Unmap { bytes });
        remove(session, start);
    }
    Ok(())
}

/// Whether an address is reserved, or mapped behind a reservation.
fn is_known(session: &Session<'_>, address: u64) -> bool {
    session.virtual_reservation_at(address).is_some() || session.virtual_mapping_at(address).is_some()
}

/// Takes one mapping away, with what only it kept alive.
pub(crate) fn remove(session: &mut Session<'_>, start: u64) {
    let Some(mapping) = session.mappings.remove(&start) else { return };
    if mapping.access.contains_key(&Grantee::Host) && is_ours(session, start, start + mapping.bytes) {
        // What fails here leaves the memory reachable, which the kernel then refuses to unmap in part; there is
        // nothing better to do about a lack of kernel memory.
        let _ = space::detach(start, mapping.bytes as usize);
    }
    match mapping.handle {
        Some(value) => {
            if let Some(handle) = session.handles.get_mut(&value) {
                handle.mappings -= 1;
            }
            session.settle_handle(value);
        }
        None => session.drop_user(mapping.memory_id),
    }
}

/// Whether the kernel reserved all of `start..end` for us, so that it may be mapped over.
pub(crate) fn is_ours(session: &Session<'_>, start: u64, end: u64) -> bool {
    let mut at = start;
    while at < end {
        match session.reservation_at(at) {
            Some((from, found)) => at = from + found.bytes,
            None => return false,
        }
    }
    true
}
