//! The tables, and the figures that are held to a limit.

use comfy_table::{CellAlignment, Table, presets};

use super::boards::Board;
use super::emulate::Output;
use super::image::{ENTRIES, Image};

/// What is known of one board.
pub(super) struct Seen {
    pub(super) board: &'static Board,
    /// In the order of [`ENTRIES`].
    pub(super) images: Vec<Image>,
    pub(super) vectors: Output,
    pub(super) gesture: Output,
}

/// What a figure must not exceed.
struct Limit {
    core: &'static str,
    entry: &'static str,
    /// Bytes of flash.
    flash: u64,
    /// Bytes of stack, where it is held to any.
    stack: Option<u64>,
}

const LIMITS: &[Limit] = &[
    Limit { core: "Cortex-M4F", entry: "streaming", flash: 16 << 10, stack: Some(1 << 10) },
    Limit { core: "Cortex-M0", entry: "int8", flash: 12 << 10, stack: None },
];

/// Prints everything; `false` if a figure exceeds its limit or the example's two classifiers fall short.
pub(super) fn print(seen: &[Seen], host_gesture: &Output) -> bool {
    let mut passed = true;
    for here in seen {
        println!("\n{}, {} ({}), opt-level s, fat LTO", here.board.name, here.board.core, here.board.target);
        let mut table = table([
            "entry point",
            ".text",
            ".rodata",
            "flash",
            "static RAM",
            "stack ≤",
            "in cases",
            "instructions per token",
        ]);
        for (entry, image) in ENTRIES.iter().zip(&here.images) {
            let or_none = |x: Option<u64>| x.map_or_else(|| "–".to_owned(), |x| x.to_string());
            let instructions = here.vectors.instructions(entry.case).map(|x| x.round() as u64);
            table.add_row([
                entry.name.to_owned(),
                image.text.to_string(),
                image.rodata.to_string(),
                image.flash().to_string(),
                image.ram.to_string(),
                or_none(image.stack),
                or_none(here.vectors.stack(entry.name)),
                or_none(instructions),
            ]);
            passed &= within(here, entry.name, image.flash(), image.ram, [image.stack, here.vectors.stack(entry.name)]);
        }
        println!("{table}");
        for words in &here.gesture.words {
            println!("gesture: {words}");
        }
        for cost in &here.gesture.costs {
            println!(
                "gesture: {} {:.0} instructions a window, {} bytes of stack",
                cost.case, cost.instructions, cost.stack
            );
        }
    }
    println!(
        "\nEvery image: no panic (it would not link), no allocator, no formatting; int8 and int8-ring: no floating-point"
    );
    println!("instruction or routine. Every board: {} results, bit for bit the host's.", results(seen, host_gesture));
    passed
}

fn results(seen: &[Seen], host_gesture: &Output) -> usize {
    seen.first().map_or(0, |here| here.vectors.cases.len()) + host_gesture.cases.len()
}

/// Holds one image to its limit, if it has one. Static RAM has the same limit everywhere: none.
fn within(here: &Seen, entry: &str, flash: u64, ram: u64, stacks: [Option<u64>; 2]) -> bool {
    let mut passed = true;
    let mut hold = |what: &str, value: u64, most: u64| {
        if value > most {
            println!("{}, {entry}: {value} bytes of {what}, at most {most} are promised", here.board.core);
            passed = false;
        }
    };
    hold("static RAM", ram, 0);
    if let Some(limit) = LIMITS.iter().find(|limit| limit.core == here.board.core && limit.entry == entry) {
        hold("flash", flash, limit.flash);
        if let Some(most) = limit.stack {
            stacks.into_iter().flatten().for_each(|stack| hold("stack", stack, most));
        }
    }
    passed
}

fn table<const N: usize>(header: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_header(header);
    for n in 1..N {
        if let Some(column) = table.column_mut(n) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}
