//! User objects: something of the caller's, whose destructor runs once nothing refers to it any more.
//!
//! The caller's references and those of graphs, executables and launches are shares of one [`Object`]. When the last
//! one goes, the destructor is queued for a thread that does nothing else.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::graph;
use crate::session::{Answer, Session};
use crate::simulator::Shared;
use crate::thread::Callback;
use crate::work::HostCall;

/// What the shares are of.
pub(crate) struct Object {
    destructor: HostCall,
    destructors: Arc<Destructors>,
}

impl Drop for Object {
    fn drop(&mut self) {
        self.destructors.add(self.destructor);
    }
}

/// A user object, as the caller knows it.
pub(crate) struct UserObject {
    object: Weak<Object>,
    /// The caller's share, and how many references that is; the graphs' are theirs.
    owned: Option<(Arc<Object>, u64)>,
}

impl UserObject {
    pub(crate) fn is_alive(&self) -> bool {
        self.object.strong_count() > 0
    }

    fn references(&self) -> u64 {
        self.owned.as_ref().map_or(0, |(_, count)| *count)
    }

    /// Takes `count` references away, or all if there are no more.
    fn take(&mut self, count: u64) {
        match &mut self.owned {
            Some((_, owned)) if *owned > count => *owned -= count,
            _ => self.owned = None,
        }
    }
}

/// Destructors that are due. Once the driver is gone none is run any more, as when a process exits.
#[derive(Default)]
pub(crate) struct Destructors {
    due: Mutex<Due>,
    changed: Condvar,
}

#[derive(Default)]
struct Due {
    calls: VecDeque<HostCall>,
    /// Whether a thread runs them.
    served: bool,
    closed: bool,
}

impl Destructors {
    fn lock(&self) -> MutexGuard<'_, Due> {
        self.due.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, call: HostCall) {
        let mut due = self.lock();
        if !due.closed {
            due.calls.push_back(call);
            self.changed.notify_one();
        }
    }

    /// Runs none any more.
    pub(crate) fn close(&self) {
        let mut due = self.lock();
        due.closed = true;
        due.calls.clear();
        self.changed.notify_all();
    }

    /// The next one; none when there will be none.
    fn next(&self) -> Option<HostCall> {
        let mut due = self.lock();
        while !due.closed {
            if let Some(call) = due.calls.pop_front() {
                return Some(call);
            }
            due = self.changed.wait(due).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

/// Sees to it that a thread runs destructors.
fn serve(shared: &Arc<Shared>) -> Answer {
    let mut due = shared.destructors.lock();
    if !due.served {
        let work = {
            let shared = shared.clone();
            move || {
                let thread = std::thread::current().id();
                shared.lock().thread(thread).run(Callback::Destructor);
                while let Some(call) = shared.destructors.next() {
                    call.call();
                }
            }
        };
        let spawned = std::thread::Builder::new().name("cuvmm-sim objects".into()).spawn(work);
        spawned.map_err(|_| CUresult::OUT_OF_MEMORY)?;
        due.served = true;
    }
    Ok(())
}

/// A count of references that a call may be about.
fn counted(count: u32) -> Answer<u32> {
    if (1..=i32::MAX as u32).contains(&count) { Ok(count) } else { Err(CUresult::INVALID_VALUE) }
}

/// The object that somebody names, with its number.
fn named(session: &mut Session<'_>, object: CUuserObject) -> Answer<(u64, Arc<Object>)> {
    let id = object.0.addr() as u64;
    match session.user_objects.get(&id).and_then(|found| found.object.upgrade()) {
        Some(found) => Ok((id, found)),
        None => {
            session.violation(format!("user object {id:#x} is not alive"));
            Err(CUresult::INVALID_VALUE)
        }
    }
}

pub(crate) fn create(
    session: &mut Session<'_>,
    destructor: HostCall,
    references: u32,
    flags: CUuserObject_flags,
) -> Answer<CUuserObject> {
    counted(references)?;
    if destructor.function.is_none() || flags != CUuserObject_flags::NO_DESTRUCTOR_SYNC {
        return Err(CUresult::INVALID_VALUE);
    }
    serve(session.shared)?;
    // The dead are forgotten once they can be as many as the others, so that it costs each object but little.
    if session.user_objects.len() > 2 * session.objects_alive {
        session.user_objects.retain(|_, object| object.is_alive());
        session.objects_alive = session.user_objects.len();
    }
    let object = Arc::new(Object { destructor, destructors: session.shared.destructors.clone() });
    let id = session.number();
    let known = UserObject { object: Arc::downgrade(&object), owned: Some((object, references.into())) };
    session.user_objects.insert(id, known);
    Ok(CUuserObject(std::ptr::without_provenance_mut(id as usize)))
}

pub(crate) fn retain(session: &mut Session<'_>, object: CUuserObject, count: u32) -> Answer {
    let count = counted(count)?;
    let (id, object) = named(session, object)?;
    if let Some(found) = session.user_objects.get_mut(&id) {
        found.owned.get_or_insert((object, 0)).1 += u64::from(count);
    }
    Ok(())
}

/// Gives back references of the caller's; those of graphs are not his to give.
pub(crate) fn release(session: &mut Session<'_>, object: CUuserObject, count: u32) -> Answer {
    let count = counted(count)?;
    let (id, _object) = named(session, object)?;
    owned(session, id, count)?.take(count.into());
    Ok(())
}

/// The object, of which the caller has so many references.
fn owned<'a>(session: &'a mut Session<'_>, id: u64, count: u32) -> Answer<&'a mut UserObject> {
    if session.user_objects.get(&id).is_none_or(|found| found.references() < u64::from(count)) {
        session.violation(format!("user object {id:#x} has fewer references of the caller's"));
        return Err(CUresult::INVALID_VALUE);
    }
    session.user_objects.get_mut(&id).ok_or(CUresult::INVALID_VALUE)
}

pub(crate) fn graph_retain(
    session: &mut Session<'_>,
    graph: CUgraph,
    object: CUuserObject,
    count: u32,
    flags: CUuserObjectRetain_flags,
) -> Answer {
    let count = counted(count)?;
    if flags.0 > CUuserObjectRetain_flags::MOVE.0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let graph = graph::named(session, graph)?;
    let (id, object) = named(session, object)?;
    if flags == CUuserObjectRetain_flags::MOVE {
        owned(session, id, count)?.take(count.into());
    }
    if let Some(graph) = session.graphs.get_mut(&graph) {
        graph.keep(id, object, count);
    }
    Ok(())
}

pub(crate) fn graph_release(session: &mut Session<'_>, graph: CUgraph, object: CUuserObject, count: u32) -> Answer {
    let count = counted(count)?;
    let graph_id = graph::named(session, graph)?;
    let (id, _object) = named(session, object)?;
    let graph = session.graphs.get_mut(&graph_id).ok_or(CUresult::INVALID_VALUE)?;
    if !graph.let_go(id, count) {
        session.violation(format!("a graph has fewer references to user object {id:#x}"));
        if !session.policy.graph_releases_what_it_lacks {
            return Err(CUresult::INVALID_VALUE);
        }
        // There is one count of references: what the graph lacks is taken from the caller's.
        let lacking = u64::from(count) - session.graphs.get_mut(&graph_id).map_or(0, |graph| graph.let_all_go(id));
        if let Some(found) = session.user_objects.get_mut(&id) {
            found.take(lacking);
        }
    }
    Ok(())
}
