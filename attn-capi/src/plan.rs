//! Plans and workspaces, which a caller keeps between calls.

use std::sync::{Mutex, MutexGuard, TryLockError};

use attn_core::AttnShape;
use attn_simd::{Level, Line, Workspace};

use crate::args::{Call, Callbacks, Finish, Part};
use crate::call;
use crate::error::{Error, Result};
use crate::options::{Kept, Masks, Tables, attention};
use crate::raw::Described;
use crate::state;
use crate::types::{AttnDtype, AttnOptions};

/// Options and sizes, checked once. Never changes; any number of threads may run one plan at once, each with a
/// workspace of its own.
#[derive(Debug)]
pub struct AttnPlan {
    /// Their numbers. Their pointers are never followed again.
    options: AttnOptions,
    kept: Kept,
    nodes: Vec<Option<usize>>,
    pub(crate) described: Described,
    callbacks: Option<Callbacks>,
    level: Level,
    shape: AttnShape,
    lines: usize,
}

impl AttnPlan {
    /// Checks everything and copies the tables.
    pub(crate) fn new(
        options: AttnOptions,
        tables: &Tables<'_>,
        (described, masks): (Described, &Masks<'_>),
        callbacks: Option<Callbacks>,
        level: Level,
        shape: AttnShape,
    ) -> Result<Self> {
        let nodes = tables.nodes()?;
        let attn = attention(&options, tables, masks, &nodes)?;
        let lines = call::workspace_lines(attn, callbacks, level, shape)?;
        Ok(Self { options, kept: tables.kept(), nodes, described, callbacks, level, shape, lines })
    }

    /// Bytes of scratch for one thread.
    pub(crate) fn workspace_bytes(&self) -> usize {
        self.lines * size_of::<Line>()
    }

    /// Runs the plan. `masks` are the tensors of its options, read anew.
    pub(crate) fn run(&self, masks: &Masks<'_>, workspace: Option<&AttnWorkspace>, call: Call<'_>) -> Result<()> {
        let tables = self.kept.tables();
        let attn = attention(&self.options, &tables, masks, &self.nodes)?;
        let run = |runner| call::run(attn, self.callbacks, self.level, self.shape, runner, call);
        let Some(workspace) = workspace else {
            return run(call::on_threads(self.options.threads));
        };
        let mut scratch = workspace.lock()?;
        run(call::on_threads(self.options.threads).workspaces(&mut scratch))
    }

    /// Floats in the states of a part.
    pub(crate) fn state_len(&self) -> Result<usize> {
        Ok(attn_core::state::len(&self.shape)?)
    }

    /// Computes the states of a part of the keys, on this thread.
    pub(crate) fn state(&self, masks: &Masks<'_>, workspace: Option<&AttnWorkspace>, part: Part<'_>) -> Result<()> {
        let tables = self.kept.tables();
        let attn = attention(&self.options, &tables, masks, &self.nodes)?;
        let compute = |scratch: &mut _| state::compute(attn, self.callbacks, self.level, self.shape, scratch, part);
        match workspace {
            None => compute(&mut Workspace::new()),
            Some(workspace) => match workspace.lock()?.first_mut() {
                None => compute(&mut Workspace::new()),
                Some(scratch) => compute(scratch),
            },
        }
    }

    /// Makes the result of merged states.
    pub(crate) fn finish(&self, masks: &Masks<'_>, end: Finish<'_>) -> Result<()> {
        let tables = self.kept.tables();
        let attn = attention(&self.options, &tables, masks, &self.nodes)?;
        state::finish(attn, self.level, self.shape, end)
    }

    /// Describes the kernel that runs.
    pub(crate) fn explain(&self, masks: &Masks<'_>, dtype: AttnDtype) -> Result<String> {
        let tables = self.kept.tables();
        let attn = attention(&self.options, &tables, masks, &self.nodes)?;
        call::explain(attn, self.callbacks, self.level, self.shape, dtype)
    }
}

/// Scratch for the threads of one call at a time. It belongs to no plan, and grows to the size that a plan needs.
#[derive(Debug)]
pub struct AttnWorkspace {
    scratch: Mutex<Vec<Workspace>>,
}

impl AttnWorkspace {
    /// Scratch for so many threads (0 for all), large enough for a plan.
    pub(crate) fn new(plan: Option<&AttnPlan>, threads: usize) -> Result<Self> {
        let all = attn_parallel::threads().max(1); // more could never work at once
        let count = if threads == 0 { all } else { threads.min(all) };
        let mut scratch = vec![Workspace::new(); count];
        for one in &mut scratch {
            one.try_lines(plan.map_or(0, |plan| plan.lines))?;
        }
        Ok(Self { scratch: Mutex::new(scratch) })
    }

    /// Bytes held.
    ///
    /// Returns `Busy` if a call holds the workspace. It does not wait: that call may be running the caller's function
    /// that asks.
    pub(crate) fn bytes(&self) -> Result<usize> {
        Ok(self.lock()?.iter().map(Workspace::bytes).sum())
    }

    fn lock(&self) -> Result<MutexGuard<'_, Vec<Workspace>>> {
        match self.scratch.try_lock() {
            Ok(scratch) => Ok(scratch),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()), // what scratch holds means nothing
            Err(TryLockError::WouldBlock) => Err(Error::Busy),
        }
    }
}
