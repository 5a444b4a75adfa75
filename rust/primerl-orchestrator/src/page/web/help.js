// What a curve means, what is normal, and what to do if it is not: in short; docs/recipes/not-learning.md has more.

import { el } from "./common.js";

/** The first that fits: pattern, what it means, what is normal, what to do. */
const HELP = [
  [/^reward\/.*\/std$/, "How far the rewards of a batch are apart.", "Above 0 as long as there is something to learn.", "Near 0, all rollouts are equally good or bad: harder or easier examples, a graded reward."],
  [/^reward\//, "Mean reward of the rollouts of a step.", "It rises, with noise; the moving mean is what to look at.", "Flat from the start: read ten rollouts. It rises and evaluations do not: it learns the training examples."],
  [/^advantage\//, "How far rollouts are from the mean of their group.", "The mean is near 0; the spread is not.", "A spread near 0: groups of equal rewards teach nothing. Larger groups, a higher temperature, a graded reward."],
  [/^loss\//, "The loss that is minimised.", "For a policy gradient it says little, and goes to 0 with the advantages. With a teacher or examples it falls.", "Not a number, or jumps: a lower learning rate."],
  [/^entropy\//, "How undecided the policy is, in nats per token.", "Falls slowly while the reward rises.", "Falls to 0 early: a lower learning rate, a higher temperature. Grows without end: the learning rate is too high."],
  [/^mismatch_kl\//, "How far the trainer's probabilities are from the engine's, for tokens that were sampled.", "Near 0 at step 1; it grows with staleness and stays below about 0.01.", "High at step 1: another dtype or attention (`primerl verify` names the tokens). Rising: less asynchrony, a lower learning rate."],
  [/^optim\/grad_norm/, "Length of the gradient before clipping.", "Of one order of magnitude, with single jumps.", "0: no signal. Always far above the bound: every step is as long as clipping allows; a lower learning rate."],
  [/^optim\/lr/, "Learning rate of the step.", "As the schedule says.", "1e-5 for a whole model, and ten times that for an adapter, are usual."],
  [/^staleness\//, "How many versions behind the oldest token of a sample is.", "0 to 2.", "At `max_off_policy_steps`: sampling runs too far ahead; a lower `max_async_level` or `oversampling_factor`."],
  [/^rollouts\//, "Rollouts a step that were not trained, and why.", "Few; some are filtered if examples are too easy or too hard.", "`primerl trace FOLDER --dropped` has the reasons."],
  [/^(errors|errored_rollouts)\//, "Share of the rollouts that failed, by kind of error.", "Below a few percent.", "The log of the environment's worker has the traceback."],
  [/^is_truncated\//, "Share of the rollouts that were cut off.", "Near 0, and not growing.", "Raise `sampling.max_tokens`; look whether the reward pays for length."],
  [/^seq_len\//, "Tokens of a sample.", "Well below `seq_len`.", "Near it: samples are dropped or cut; raise `seq_len`."],
  [/^time\//, "Seconds of a step, and of its parts.", "Most is forward and backward.", "Mostly waiting for the batch: more engines, more env workers, or a higher `max_async_level`."],
  [/^perf\/shared_tokens/, "Share of the tokens that is computed, where samples begin alike.", "Below 1 with long prompts.", "1 is no error: there is too little in common."],
  [/^perf\//, "How fast the trainer computes.", "Steady.", "Falling: longer samples, or another program on the same machine."],
  [/^masked/, "Share of the tokens that do not count, since their ratio is out of bounds.", "Below 1 % in the mean.", "High for many steps: the learning rate is too high for this staleness."],
  [/^buffer\//, "Examples in each pool of difficulty.", "They move from hard to easy.", "Nearly all hard: easier examples or a supervised start. Nearly all easy: nothing remains to be learnt."],
  [/^metric\//, "What the environment measures besides the reward.", "Its author knows.", "If it moves against the reward, the reward pays for the wrong thing."],
];

/** `{means, normal, todo}`; `null` of a name that nothing is known of. */
export function helpOf(name) {
  const found = HELP.find(([pattern]) => pattern.test(name));
  return found ? { means: found[1], normal: found[2], todo: found[3] } : null;
}

/** A question mark that opens the text. */
export function help(name) {
  const found = helpOf(name);
  if (!found) return null;
  const line = (title, text) => el("p", {}, el("b", { text: `${title} ` }), text);
  return el("details", { class: "help" }, el("summary", { "aria-label": `What is ${name}?`, title: found.means, text: "?" }),
    line("What it means:", found.means), line("What is normal:", found.normal), line("What to do:", found.todo));
}
