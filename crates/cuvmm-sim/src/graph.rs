//! Graphs: their nodes, what is made from them, and launching that.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use cuvmm_driver::CUresult;
use cuvmm_driver::sys::*;

use crate::capture;
use crate::context;
use crate::copy::{self, Side};
use crate::session::{Answer, Session};
use crate::user_object::Object;
use crate::work::{HostCall, Run, Work};

/// A graph.
#[derive(Default)]
pub(crate) struct Graph {
    /// Each comes after those that it depends on.
    nodes: Vec<Node>,
    /// The user objects that it has references to, with how many.
    objects: BTreeMap<u64, (Arc<Object>, u64)>,
    /// Whether its capture goes on.
    pub(crate) capturing: bool,
}

struct Node {
    number: u64,
    work: Work,
    /// The nodes that a capture recorded it after; none for a node that was added by hand.
    captured_after: Option<Vec<u64>>,
}

/// What can be launched.
pub(crate) struct Executable {
    work: Arc<[Work]>,
    objects: Arc<[Arc<Object>]>,
    /// The job of its last launch.
    last: Option<u64>,
}

impl Graph {
    /// One that a capture adds to.
    pub(crate) fn capturing() -> Self {
        Self { capturing: true, ..Self::default() }
    }

    /// Adds what a capture recorded.
    pub(crate) fn record(&mut self, number: u64, work: Work, after: Vec<u64>) {
        self.nodes.push(Node { number, work, captured_after: Some(after) });
    }

    /// Whether each captured node comes before one of `ends`, or is one.
    pub(crate) fn is_joined(&self, ends: &[u64]) -> bool {
        let mut before: BTreeSet<u64> = ends.iter().copied().collect();
        for node in self.nodes.iter().rev() {
            if let Some(after) = &node.captured_after {
                if !before.contains(&node.number) {
                    return false;
                }
                before.extend(after);
            }
        }
        true
    }

    /// Gives it references to a user object.
    pub(crate) fn keep(&mut self, id: u64, object: Arc<Object>, count: u32) {
        self.objects.entry(id).or_insert((object, 0)).1 += u64::from(count);
    }

    /// Takes all its references to a user object from it; how many that were.
    pub(crate) fn let_all_go(&mut self, id: u64) -> u64 {
        self.objects.remove(&id).map_or(0, |(_, count)| count)
    }

    /// Takes references from it, if it has so many.
    pub(crate) fn let_go(&mut self, id: u64, count: u32) -> bool {
        match self.objects.get_mut(&id) {
            Some((_, kept)) if *kept > u64::from(count) => *kept -= u64::from(count),
            Some((_, kept)) if *kept == u64::from(count) => drop(self.objects.remove(&id)),
            _ => return false,
        }
        true
    }
}

/// The graph that a call names, be it that a capture still adds to it.
pub(crate) fn named(session: &mut Session<'_>, graph: CUgraph) -> Answer<u64> {
    let id = graph.0.addr() as u64;
    if session.graphs.contains_key(&id) {
        return Ok(id);
    }
    session.violation(format!("graph {id:#x} is not alive"));
    Err(CUresult::INVALID_VALUE)
}

/// The graph that a call names, which belongs to the caller alone.
fn owned(session: &mut Session<'_>, graph: CUgraph) -> Answer<u64> {
    let id = named(session, graph)?;
    if session.graphs.get(&id).is_some_and(|graph| graph.capturing) {
        session.violation(format!("graph {id:#x} is its capture's"));
        return Err(CUresult::INVALID_VALUE);
    }
    Ok(id)
}

pub(crate) fn create(session: &mut Session<'_>, flags: u32) -> Answer<CUgraph> {
    if flags != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let id = session.number();
    session.graphs.insert(id, Graph::default());
    Ok(CUgraph(std::ptr::without_provenance_mut(id as usize)))
}

pub(crate) fn destroy(session: &mut Session<'_>, graph: CUgraph) -> Answer {
    let id = owned(session, graph)?;
    session.graphs.remove(&id);
    Ok(())
}

/// Adds a node by hand.
fn add(session: &mut Session<'_>, graph: u64, after: &[CUgraphNode], work: Work) -> Answer<CUgraphNode> {
    let number = session.number();
    let graph = session.graphs.get_mut(&graph).ok_or(CUresult::INVALID_VALUE)?;
    // Later nodes have higher numbers.
    let known =
        |node: &CUgraphNode| graph.nodes.binary_search_by_key(&node.0.addr(), |other| other.number as usize).is_ok();
    let mut numbers: Vec<usize> = after.iter().map(|node| node.0.addr()).collect();
    numbers.sort_unstable();
    if !after.iter().all(known) || numbers.windows(2).any(|pair| pair[0] == pair[1]) {
        return Err(CUresult::INVALID_VALUE);
    }
    graph.nodes.push(Node { number, work, captured_after: None });
    Ok(value_of(number))
}

fn context_of_a_node(session: &mut Session<'_>, context: CUcontext) -> Answer<u64> {
    if context.is_null() { Err(CUresult::INVALID_VALUE) } else { context::named(session, context) }
}

/// The device that a copy node is for, which need not name a context.
fn device_of_a_copy(session: &mut Session<'_>, context: CUcontext) -> Answer<i32> {
    if !context.is_null() {
        let context = context::named(session, context)?;
        return Ok(context::device_of(session, context));
    }
    Ok(context::current(session).map_or(0, |context| context::device_of(session, context)))
}

/// A node, as the caller knows it.
pub(crate) fn value_of(node: u64) -> CUgraphNode {
    CUgraphNode(std::ptr::without_provenance_mut(node as usize))
}

pub(crate) fn add_memcpy(
    session: &mut Session<'_>,
    graph: CUgraph,
    after: &[CUgraphNode],
    asked: &CUDA_MEMCPY3D,
    context: CUcontext,
) -> Answer<CUgraphNode> {
    let graph = named(session, graph)?;
    let device = device_of_a_copy(session, context)?;
    let side = |kind, host, device| match kind {
        CUmemorytype::HOST => Ok(Side::host(host)),
        CUmemorytype::DEVICE => Ok(Side::device(device)),
        CUmemorytype::UNIFIED => Ok(Side::unified(device)),
        CUmemorytype::ARRAY => Err(CUresult::NOT_SUPPORTED),
        _ => Err(CUresult::INVALID_VALUE),
    };
    let from = side(asked.src_memory_type, asked.src_host, asked.src_device)?;
    let to = side(asked.dst_memory_type, asked.dst_host.cast_const(), asked.dst_device)?;
    if !asked.reserved0.is_null() || !asked.reserved1.is_null() {
        return Err(CUresult::INVALID_VALUE);
    }
    let bytes = asked.width_in_bytes;
    if bytes == 0 || asked.height == 0 || asked.depth == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    let offsets = [
        [asked.src_x_in_bytes, asked.src_y, asked.src_z, asked.src_lod],
        [asked.dst_x_in_bytes, asked.dst_y, asked.dst_z, asked.dst_lod],
    ];
    if asked.height > 1 || asked.depth > 1 || offsets.as_flattened().iter().any(|&offset| offset != 0) {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let work = copy::copy_work(session, device, to, from, bytes)?;
    copy::refuse_unusable(session, &work)?;
    add(session, graph, after, work)
}

pub(crate) fn add_memset(
    session: &mut Session<'_>,
    graph: CUgraph,
    after: &[CUgraphNode],
    asked: &CUDA_MEMSET_NODE_PARAMS,
    context: CUcontext,
) -> Answer<CUgraphNode> {
    let graph = named(session, graph)?;
    let context = context_of_a_node(session, context)?;
    let bytes = asked.value.to_le_bytes();
    let element = match asked.element_size {
        size @ (1 | 2 | 4) => &bytes[..size as usize],
        _ => return Err(CUresult::INVALID_VALUE),
    };
    if asked.width == 0 || asked.height == 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    if asked.height > 1 {
        return Err(CUresult::NOT_SUPPORTED);
    }
    let work = copy::fill_work(session, context, asked.dst, element, asked.width)?;
    let work = work.ok_or(CUresult::INVALID_VALUE)?;
    work.refuse_unusable(session)?;
    add(session, graph, after, work)
}

pub(crate) fn add_host(
    session: &mut Session<'_>,
    graph: CUgraph,
    after: &[CUgraphNode],
    call: HostCall,
) -> Answer<CUgraphNode> {
    let graph = named(session, graph)?;
    if call.function.is_none() {
        return Err(CUresult::INVALID_VALUE);
    }
    add(session, graph, after, Work::Host(call))
}

/// Makes what can be launched, where the memory of sets may be used now; all is looked up again as it runs.
pub(crate) fn instantiate(session: &mut Session<'_>, graph: CUgraph, flags: u64) -> Answer<CUgraphExec> {
    let id = owned(session, graph)?;
    if flags & !0b1111 != 0 {
        return Err(CUresult::INVALID_VALUE);
    }
    capture::refuse_unsafe(session)?;
    let graph = session.graphs.get(&id).ok_or(CUresult::INVALID_VALUE)?;
    let mut sets = graph.nodes.iter().filter(|node| matches!(node.work, Work::Fill { .. }));
    sets.try_for_each(|node| node.work.refuse_unusable(session))?;
    let work = graph.nodes.iter().map(|node| node.work.clone()).collect();
    let objects = graph.objects.values().map(|(object, _)| object.clone()).collect();
    let executable = session.number();
    session.executables.insert(executable, Executable { work, objects, last: None });
    Ok(CUgraphExec(std::ptr::without_provenance_mut(executable as usize)))
}

/// The executable that a call names.
fn executable<'a>(session: &'a mut Session<'_>, executable: CUgraphExec) -> Answer<(u64, &'a mut Executable)> {
    let id = executable.0.addr() as u64;
    if !session.executables.contains_key(&id) {
        session.violation(format!("executable graph {id:#x} is not alive"));
    }
    session.executables.get_mut(&id).map(|found| (id, found)).ok_or(CUresult::INVALID_VALUE)
}

/// Launches an executable: after its last launch, on whatever stream that was.
pub(crate) fn launch(session: &mut Session<'_>, graph: CUgraphExec, stream: CUstream) -> Answer {
    let (id, found) = executable(session, graph)?;
    let run = Run { work: found.work.clone(), _objects: found.objects.clone(), after: found.last };
    let (stream, _) = session.working_stream(stream)?;
    let work = Work::Graph(run);
    if work.runs(&|module| !session.modules.contains_key(&module)) {
        session.violation("a graph runs a function of a module that is not loaded any more");
        return Err(CUresult::INVALID_VALUE);
    }
    capture::enter_unrecorded(session, stream)?;
    let spans = work.spans();
    let number = session.enqueue(stream, work, spans, false)?;
    if let Some(found) = session.executables.get_mut(&id) {
        found.last = Some(number);
    }
    Ok(())
}

/// Destroys an executable; launches of it that are under way keep what they need.
pub(crate) fn executable_destroy(session: &mut Session<'_>, graph: CUgraphExec) -> Answer {
    let (id, _) = executable(session, graph)?;
    capture::refuse_unsafe(session)?;
    session.executables.remove(&id);
    Ok(())
}
