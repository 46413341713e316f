//! Granting access, and asking for it.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::latency::Work;
use crate::map::is_ours;
use crate::session::{Answer, Session};
use crate::space::{self, HostAccess};
use crate::state::{Grantee, Home, end_of};

/// Mapping after mapping gets its grants, one after the other, once all of them were found to make sense: one that is
/// refused leaves what came before it.
pub(crate) fn set(
    session: &mut Session<'_>,
    address: CUdeviceptr,
    size: usize,
    descriptors: &[CUmemAccessDesc],
) -> Answer {
    if size == 0 || address.0 == 0 || descriptors.is_empty() {
        return Err(CUresult::INVALID_VALUE);
    }
    let (start, end) = (address.0, end_of(address, size)?);
    let grants = descriptors.iter().map(|asked| grant_of(session, asked)).collect::<Answer<Vec<_>>>()?;
    let mut starts = session.whole_mappings(start, end).ok_or(CUresult::INVALID_VALUE)?;
    let one = session.policy.access_across_reservations || session.in_one_reservation(start, end);
    let covered = session.without_hole(&starts, start, end)
        || session.policy.grant_up_to_a_hole && has_both_ends(session, &starts, start, end);
    if !one || !covered {
        return Err(CUresult::INVALID_VALUE);
    }
    starts.truncate(before_a_hole(session, &starts, start));
    if takes_away(session, &starts, &grants) && session.is_in_use(start, end) {
        session.violation("access taken away under queued work");
    }
    for start in starts {
        check_rdma(session, start)?;
        let mut devices = 0;
        for &(grantee, flags) in &grants {
            check_reach(session, start, grantee)?;
            if grantee == Grantee::Host {
                open_to_host(session, start, flags)?;
            }
            if let Some(mapping) = session.mappings.get_mut(&start)
                && mapping.access.insert(grantee, flags) != Some(flags)
            {
                devices += 1;
            }
        }
        if let Some(mapping) = session.mappings.get(&start) {
            let host = mapping.is_host_memory();
            let work = Work::Grant { bytes: mapping.bytes, host, devices };
            session.takes(work);
        }
    }
    Ok(())
}

/// Whether the first of these mappings begins where a range does, and the last one ends where it does.
fn has_both_ends(session: &Session<'_>, starts: &[u64], start: u64, end: u64) -> bool {
    let last = starts.last().and_then(|last| Some(last + session.mappings.get(last)?.bytes));
    starts.first() == Some(&start) && last == Some(end)
}

/// How many of these mappings lie side by side from `start` on.
fn before_a_hole(session: &Session<'_>, starts: &[u64], start: u64) -> usize {
    let mut at = start;
    let adjacent = starts.iter().take_while(|&&from| {
        let adjacent = from == at;
        at = from + session.mappings.get(&from).map_or(0, |mapping| mapping.bytes);
        adjacent
    });
    adjacent.count()
}

/// Lets the host reach a mapping as it is granted, or leaves it as it was.
fn open_to_host(session: &Session<'_>, start: u64, flags: CUmemAccess_flags) -> Answer {
    attach(session, start, flags).map_err(|_| {
        let before = session.mappings.get(&start).and_then(|mapping| mapping.access.get(&Grantee::Host));
        restore(session, start, before.copied());
        CUresult::OUT_OF_MEMORY
    })
}

/// Lets the host reach a mapping, if the kernel reserved its addresses for us.
fn attach(session: &Session<'_>, start: u64, flags: CUmemAccess_flags) -> rustix::io::Result<()> {
    let access = match flags {
        CUmemAccess_flags::READ => HostAccess::Read,
        CUmemAccess_flags::READWRITE => HostAccess::ReadWrite,
        _ => HostAccess::None,
    };
    match session.mappings.get(&start) {
        Some(mapping) if is_ours(session, start, start + mapping.bytes) => {
            space::attach(start, mapping.memory.view(), access)
        }
        _ => Ok(()),
    }
}

/// Gives the host what it had. Where that fails too, it has nothing, and the addresses stay reserved.
fn restore(session: &Session<'_>, start: u64, before: Option<CUmemAccess_flags>) {
    let bytes = session.mappings.get(&start).map_or(0, |mapping| mapping.bytes);
    if is_ours(session, start, start + bytes) && before.is_none_or(|flags| attach(session, start, flags).is_err()) {
        let _ = space::detach(start, bytes as usize);
    }
}

type Grant = (Grantee, CUmemAccess_flags);

fn grant_of(session: &Session<'_>, asked: &CUmemAccessDesc) -> Answer<Grant> {
    let known = [CUmemAccess_flags::NONE, CUmemAccess_flags::READ, CUmemAccess_flags::READWRITE];
    if !known.contains(&asked.flags) {
        return Err(CUresult::INVALID_VALUE);
    }
    Ok((grantee_of(session, &asked.location)?, asked.flags))
}

fn grantee_of(session: &Session<'_>, location: &CUmemLocation) -> Answer<Grantee> {
    match location.location_type {
        CUmemLocationType::DEVICE if session.shared.machine.device(location.id).is_some() => {
            Ok(Grantee::Device(location.id))
        }
        CUmemLocationType::HOST | CUmemLocationType::HOST_NUMA => Ok(Grantee::Host),
        _ => Err(CUresult::INVALID_VALUE),
    }
}

fn check_reach(session: &Session<'_>, start: u64, grantee: Grantee) -> Answer {
    let mapping = session.mappings.get(&start).ok_or(CUresult::INVALID_VALUE)?;
    let location = mapping.memory.properties.location;
    match grantee {
        Grantee::Host if mapping.is_host_memory() => Ok(()),
        Grantee::Host => Err(CUresult::NOT_SUPPORTED),
        Grantee::Device(_) if mapping.is_host_memory() => Ok(()),
        Grantee::Device(device) => {
            let home = session.physical.get(&mapping.memory_id).map(|physical| physical.home);
            // The device of imported memory need not be visible here; its peers then are not known either.
            let hidden = home == Some(Home::Foreign) && location.id < 0;
            let reaches = hidden || session.shared.machine.reaches(device, location.id);
            if reaches { Ok(()) } else { Err(CUresult::INVALID_VALUE) }
        }
    }
}

/// Refuses what the machine does not grant of memory that RDMA may reach.
fn check_rdma(session: &Session<'_>, start: u64) -> Answer {
    let mapping = session.mappings.get(&start);
    let reached = mapping.is_some_and(|mapping| mapping.memory.properties.alloc_flags.gpu_direct_rdma_capable != 0);
    match session.shared.machine.rdma_grants {
        Some(code) if reached => Err(code),
        _ => Ok(()),
    }
}

fn takes_away(session: &Session<'_>, starts: &[u64], grants: &[Grant]) -> bool {
    starts.iter().filter_map(|start| session.mappings.get(start)).any(|mapping| {
        grants.iter().any(|(grantee, flags)| mapping.access.get(grantee).is_some_and(|before| before > flags))
    })
}

pub(crate) fn get(session: &Session<'_>, location: CUmemLocation, address: CUdeviceptr) -> Answer<u64> {
    let grantee = grantee_of(session, &location).map_err(|_| CUresult::INVALID_DEVICE)?;
    let (_, mapping) = session.mapping_at(address.0).ok_or(CUresult::INVALID_VALUE)?;
    if mapping.handle.is_none() {
        // Nobody grants plain memory, so nothing is told of it.
        return Ok(0);
    }
    let granted = |grantee| mapping.access.get(&grantee).map_or(0, |flags| u64::from(flags.0));
    let is_host = location.location_type == CUmemLocationType::HOST;
    if is_host && session.policy.host_access_is_the_first_devices {
        return Ok(granted(grantee) | granted(Grantee::Device(0)));
    }
    Ok(granted(grantee))
}
