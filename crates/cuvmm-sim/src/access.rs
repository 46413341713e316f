//! Granting access, and asking for it.

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::map::is_ours;
use crate::session::{Answer, Session};
use crate::space::{self, HostAccess};
use crate::state::{Grantee, Home, end_of};

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
    let starts = session.whole_mappings(start, end).ok_or(CUresult::INVALID_VALUE)?;
    let one = session.policy.access_across_reservations || session.in_one_reservation(start, end);
    if !one || !session.without_hole(&starts, start, end) {
        return Err(CUresult::INVALID_VALUE);
    }
    for start in &starts {
        for (grantee, _) in &grants {
            check_reach(session, *start, *grantee)?;
        }
    }
    if takes_away(session, &starts, &grants) && session.is_in_use(start, end) {
        session.violation("access taken away under queued work");
    }
    for start in starts {
        apply(session, start, &grants)?;
    }
    Ok(())
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

fn is_host_memory(location: CUmemLocation) -> bool {
    matches!(location.location_type, CUmemLocationType::HOST | CUmemLocationType::HOST_NUMA)
}

fn check_reach(session: &Session<'_>, start: u64, grantee: Grantee) -> Answer {
    let mapping = session.mappings.get(&start).ok_or(CUresult::INVALID_VALUE)?;
    let location = mapping.memory.properties.location;
    match grantee {
        Grantee::Host if is_host_memory(location) => Ok(()),
        Grantee::Host => Err(CUresult::NOT_SUPPORTED),
        Grantee::Device(_) if is_host_memory(location) => Ok(()),
        Grantee::Device(device) => {
            let home = session.physical.get(&mapping.memory_id).map(|physical| physical.home);
            // The device of imported memory need not be visible here; its peers then are not known either.
            let hidden = home == Some(Home::Foreign) && location.id < 0;
            let reaches = hidden || session.shared.machine.reaches(device, location.id);
            if reaches { Ok(()) } else { Err(CUresult::INVALID_VALUE) }
        }
    }
}

fn takes_away(session: &Session<'_>, starts: &[u64], grants: &[Grant]) -> bool {
    starts.iter().filter_map(|start| session.mappings.get(start)).any(|mapping| {
        grants.iter().any(|(grantee, flags)| mapping.access.get(grantee).is_some_and(|before| before > flags))
    })
}

fn apply(session: &mut Session<'_>, start: u64, grants: &[Grant]) -> Answer {
    let end = session.mappings.get(&start).map_or(start, |mapping| start + mapping.bytes);
    let touchable = is_ours(session, start, end);
    let Some(mapping) = session.mappings.get_mut(&start) else { return Ok(()) };
    for (grantee, flags) in grants {
        if *grantee == Grantee::Host && touchable {
            let access = match *flags {
                CUmemAccess_flags::READ => HostAccess::Read,
                CUmemAccess_flags::READWRITE => HostAccess::ReadWrite,
                _ => HostAccess::None,
            };
            space::attach(start, mapping.memory.view(), access).map_err(|_| CUresult::OUT_OF_MEMORY)?;
        }
        mapping.access.insert(*grantee, *flags);
    }
    Ok(())
}

pub(crate) fn get(session: &Session<'_>, location: CUmemLocation, address: CUdeviceptr) -> Answer<u64> {
    let grantee = grantee_of(session, &location)?;
    let (_, mapping) = session.virtual_mapping_at(address.0).ok_or(CUresult::INVALID_VALUE)?;
    Ok(mapping.access.get(&grantee).map_or(0, |flags| u64::from(flags.0)))
}
