//! Which units share a micro-batch, and which rank gets it. A unit is one sample, or samples in a tree. Looks at sizes
//! only.

/// Exchanges between two ranks per micro-batch of a rank; a bound for inputs that improve by ever less.
const EXCHANGES: usize = 8;

/// What a unit takes of a micro-batch.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Size {
    pub tokens: usize,
    pub flops: f64,
}

/// Positions of units that share a micro-batch.
#[derive(Clone, Debug, Default)]
pub(super) struct Bin {
    pub members: Vec<usize>,
    pub flops: f64,
}

impl Bin {
    fn add(&mut self, index: usize, size: Size) {
        self.members.push(index);
        self.flops += size.flops;
    }
}

/// Free room of every bin there could be, as a tree of maxima: the first bin with enough room is found in O(log n).
struct Room {
    /// Node 1 is the root, node i has the children 2i and 2i + 1, the leaves are the bins in order.
    free: Vec<usize>,
    leaves: usize,
}

impl Room {
    fn new(bins: usize, seq_len: usize) -> Self {
        let leaves = bins.next_power_of_two();
        Room {
            free: vec![seq_len; 2 * leaves],
            leaves,
        }
    }

    /// Takes `tokens` of the first bin that has them. There are as many bins as samples, so one always has.
    fn take(&mut self, tokens: usize) -> usize {
        let mut node = 1;
        while node < self.leaves {
            node *= 2;
            if self.free[node] < tokens {
                node += 1;
            }
        }
        let bin = node - self.leaves;
        self.free[node] -= tokens;
        while node > 1 {
            node /= 2;
            self.free[node] = self.free[2 * node].max(self.free[2 * node + 1]);
        }
        bin
    }
}

pub(super) fn first_fit_decreasing(sizes: &[Size], seq_len: usize) -> Vec<Bin> {
    let mut order: Vec<usize> = (0..sizes.len())
        .filter(|index| sizes[*index].tokens <= seq_len)
        .collect();
    order.sort_unstable_by_key(|index| (std::cmp::Reverse(sizes[*index].tokens), *index));
    let mut room = Room::new(order.len(), seq_len);
    let mut bins: Vec<Bin> = Vec::new();
    for index in order {
        let bin = room.take(sizes[index].tokens);
        if bin == bins.len() {
            bins.push(Bin::default());
        }
        bins[bin].add(index, sizes[index]);
    }
    bins
}

/// Makes the number of bins a multiple of `data_ranks`: splits bins between units, the dearest first, then units.
/// `halve` divides a unit in two, of which the second becomes the last of all units; `None` where it cannot.
pub(super) fn make_divisible(
    bins: &mut Vec<Bin>,
    sizes: &mut Vec<Size>,
    data_ranks: usize,
    mut halve: impl FnMut(usize) -> Option<[Size; 2]>,
) {
    let wanted = bins.len().div_ceil(data_ranks) * data_ranks;
    while bins.len() < wanted {
        // `max_by` takes the last of equals; reversed, the first.
        let dearest = (0..bins.len())
            .rev()
            .filter(|bin| bins[*bin].members.len() > 1)
            .max_by(|a, b| bins[*a].flops.total_cmp(&bins[*b].flops));
        let second = match dearest {
            Some(bin) => split(&mut bins[bin], sizes),
            None => halve_one(bins, sizes, &mut halve).unwrap_or_default(),
        };
        bins.push(second);
    }
}

/// Halves a bin by FLOPs: its members, dearest first, each to the cheaper half.
fn split(bin: &mut Bin, sizes: &[Size]) -> Bin {
    let mut halves = [Bin::default(), Bin::default()];
    for index in std::mem::take(&mut bin.members) {
        let half = usize::from(halves[1].flops < halves[0].flops);
        halves[half].add(index, sizes[index]);
    }
    let [first, second] = halves;
    *bin = first;
    second
}

/// Divides the unit of the dearest bin whose unit can be divided. Every bin holds one, or none.
fn halve_one(
    bins: &mut [Bin],
    sizes: &mut Vec<Size>,
    halve: &mut impl FnMut(usize) -> Option<[Size; 2]>,
) -> Option<Bin> {
    let mut order: Vec<usize> = (0..bins.len()).collect();
    order.sort_by(|a, b| bins[*b].flops.total_cmp(&bins[*a].flops));
    for bin in order {
        let Some(unit) = bins[bin].members.first().copied() else {
            continue;
        };
        let Some([first, second]) = halve(unit) else {
            continue;
        };
        sizes[unit] = first;
        sizes.push(second);
        bins[bin] = Bin::default();
        bins[bin].add(unit, first);
        let mut new = Bin::default();
        new.add(sizes.len() - 1, second);
        return Some(new);
    }
    None
}

/// The same number of bins for each rank, dearest first, with about the same work.
pub(super) fn balance(mut bins: Vec<Bin>, data_ranks: usize) -> Vec<Vec<Bin>> {
    let per_rank = bins.len() / data_ranks;
    bins.sort_by(|a, b| b.flops.total_cmp(&a.flops));
    let mut ranks: Vec<Vec<Bin>> = vec![Vec::with_capacity(per_rank); data_ranks];
    let mut load = vec![0.0_f64; data_ranks];
    for bin in bins {
        let open = (0..data_ranks).filter(|rank| ranks[*rank].len() < per_rank);
        let rank = open
            .min_by(|a, b| load[*a].total_cmp(&load[*b]))
            .expect("there is room for every bin");
        load[rank] += bin.flops;
        ranks[rank].push(bin);
    }
    for _ in 0..EXCHANGES * per_rank {
        if !exchange(&mut ranks, &mut load) {
            break;
        }
    }
    for rank in &mut ranks {
        rank.sort_by(|a, b| b.flops.total_cmp(&a.flops));
    }
    ranks
}

/// Exchanges the two bins of the dearest and the cheapest rank that bring these closest. Returns whether any did.
fn exchange(ranks: &mut [Vec<Bin>], load: &mut [f64]) -> bool {
    let by_load = |a: &usize, b: &usize| load[*a].total_cmp(&load[*b]);
    let (Some(high), Some(low)) = (
        (0..ranks.len()).max_by(by_load),
        (0..ranks.len()).min_by(by_load),
    ) else {
        return false;
    };
    let gap = load[high] - load[low];
    // Moving `difference` from one to the other leaves them |gap - 2 difference| apart.
    let apart = |difference: f64| (gap - 2.0 * difference).abs();
    let mut best: Option<(f64, usize, usize)> = None;
    for (i, dear) in ranks[high].iter().enumerate() {
        for (j, cheap) in ranks[low].iter().enumerate() {
            let difference = dear.flops - cheap.flops;
            if best.is_none_or(|(found, ..)| apart(difference) < apart(found)) {
                best = Some((difference, i, j));
            }
        }
    }
    let Some((difference, i, j)) = best else {
        return false;
    };
    // A gain below rounding is none: sums would be exchanged to and fro.
    if apart(difference) >= gap * (1.0 - 1e-9) {
        return false;
    }
    let dear = std::mem::take(&mut ranks[high][i]);
    let cheap = std::mem::replace(&mut ranks[low][j], dear);
    ranks[high][i] = cheap;
    load[high] -= difference;
    load[low] += difference;
    true
}
