"""Papers behind tasks, recipes, encoders, options and protocols: the one home of their bibliographic facts.

CITATION.cff is written from them by ``python docs/make_citation.py``. A field that is not known for certain is absent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from patchloom.evaluate.protocols.label_free import MEASURES
from patchloom.options.protocols import PROTOCOLS
from patchloom.recipes import recipe_named
from patchloom.tasks import TASKS
from patchloom.version import __version__

_CVPR = "IEEE/CVF Conference on Computer Vision and Pattern Recognition (CVPR)"
_ICCV = "IEEE/CVF International Conference on Computer Vision (ICCV)"
_ECCV = "European Conference on Computer Vision (ECCV)"
_NEURIPS = "Advances in Neural Information Processing Systems (NeurIPS)"
_ICML = "International Conference on Machine Learning (ICML)"
_ICLR = "International Conference on Learning Representations (ICLR)"
_TMLR = "Transactions on Machine Learning Research (TMLR)"
_JOURNALS = (_TMLR,)


@dataclass(frozen=True)
class Paper:
    """Bibliographic facts of a paper.

    Attributes:
        key: key of its BibTeX entry.
        title: title, in Unicode.
        authors: "Family, Given" of each author, in order.
        year: year of publication in ``venue``, or else on arXiv.
        venue: conference or journal; "" for a preprint.
        arxiv, doi: identifiers; "" without one.
    """

    key: str
    title: str
    authors: tuple[str, ...]
    year: int
    venue: str = ""
    arxiv: str = ""
    doi: str = ""

    @property
    def cited(self) -> str:
        """Citation in a text, such as "Wang et al., 2023"."""
        families = [author.partition(",")[0] for author in self.authors]
        names = " and ".join(families) if len(families) < 3 else f"{families[0]} et al."
        return f"{names}, {self.year}"

    def bibtex(self) -> str:
        """Return its BibTeX entry."""
        journal = self.venue in _JOURNALS
        kind = "article" if journal else "inproceedings" if self.venue else "misc"
        fields = {
            "title": f"{{{_tex(self.title)}}}",  # a second pair of braces keeps its capitals
            "author": _tex(" and ".join(self.authors)),
            "year": str(self.year),
            "journal" if journal else "booktitle": self.venue,
            "eprint": self.arxiv,
            "archivePrefix": "arXiv" if self.arxiv else "",
            "doi": self.doi,
        }
        return _entry(kind, self.key, fields)


def _paper(key: str, title: str, authors: str, year: int, venue: str = "", arxiv: str = "", doi: str = "") -> Paper:
    """Return a paper whose authors are separated by semicolons."""
    return Paper(key, title, tuple(authors.split("; ")), year, venue, arxiv, doi)


_ALL = (
    # tasks and recipes
    _paper(
        "he2022mae",
        "Masked Autoencoders Are Scalable Vision Learners",
        "He, Kaiming; Chen, Xinlei; Xie, Saining; Li, Yanghao; Dollár, Piotr; Girshick, Ross",
        2022, _CVPR, "2111.06377",
    ),
    _paper(
        "fu2024crossmae",
        "Rethinking Patch Dependence for Masked Autoencoders",
        "Fu, Letian; Lian, Long; Wang, Renhao; Shi, Baifeng; Wang, Xudong; Yala, Adam; Darrell, Trevor; "
        "Efros, Alexei A.; Goldberg, Ken",
        2024, "", "2401.14391",
    ),
    _paper(
        "xie2022simmim",
        "SimMIM: A Simple Framework for Masked Image Modeling",
        "Xie, Zhenda; Zhang, Zheng; Cao, Yue; Lin, Yutong; Bao, Jianmin; Yao, Zhuliang; Dai, Qi; Hu, Han",
        2022, _CVPR, "2111.09886",
    ),
    _paper(
        "wang2023droppos",
        "DropPos: Pre-Training Vision Transformers by Reconstructing Dropped Positions",
        "Wang, Haochen; Fan, Junsong; Wang, Yuxi; Song, Kaiyou; Wang, Tong; Zhang, Zhaoxiang",
        2023, _NEURIPS, "2309.03576",
    ),
    _paper(
        "zhai2022mp3",
        "Position Prediction as an Effective Pretraining Strategy",
        "Zhai, Shuangfei; Jaitly, Navdeep; Ramapuram, Jason; Busbridge, Dan; Likhomanenko, Tatiana; "
        "Cheng, Joseph Yitan; Talbott, Walter; Huang, Chen; Goh, Hanlin; Susskind, Joshua",
        2022, _ICML, "2207.07611",
    ),
    _paper(
        "tian2022beyond",
        "Beyond Masking: Demystifying Token-Based Pre-Training for Vision Transformers",
        "Tian, Yunjie; Xie, Lingxi; Fang, Jiemin; Shi, Mengnan; Peng, Junran; Zhang, Xiaopeng; Jiao, Jianbin; "
        "Tian, Qi; Ye, Qixiang",
        2022, "", "2203.14313",
    ),
    _paper(
        "wu2023extrema",
        "Extreme Masking for Learning Instance and Distributed Visual Representations",
        "Wu, Zhirong; Lai, Zihang; Sun, Xiao; Lin, Stephen",
        2023, _TMLR, "2206.04667",
    ),
    _paper(
        "kim2024lut",
        "Learning with Unmasked Tokens Drives Stronger Vision Learners",
        "Kim, Taekyung; Chun, Sanghyuk; Heo, Byeongho; Han, Dongyoon",
        2024, _ECCV, "2310.13593",
    ),
    _paper(
        "fang2023eva",
        "EVA: Exploring the Limits of Masked Visual Representation Learning at Scale",
        "Fang, Yuxin; Wang, Wen; Xie, Binhui; Sun, Quan; Wu, Ledell; Wang, Xinggang; Huang, Tiejun; Wang, Xinlong; "
        "Cao, Yue",
        2023, _CVPR, "2211.07636",
    ),
    _paper(
        "assran2023ijepa",
        "Self-Supervised Learning from Images with a Joint-Embedding Predictive Architecture",
        "Assran, Mahmoud; Duval, Quentin; Misra, Ishan; Bojanowski, Piotr; Vincent, Pascal; Rabbat, Michael; "
        "LeCun, Yann; Ballas, Nicolas",
        2023, _CVPR, "2301.08243",
    ),
    _paper(
        "baevski2023data2vec2",
        "Efficient Self-supervised Learning with Contextualized Target Representations for Vision, Speech and Language",
        "Baevski, Alexei; Babu, Arun; Hsu, Wei-Ning; Auli, Michael",
        2023, _ICML, "2212.07525",
    ),
    _paper(
        "lowe2026bootleg",
        "Self-Distillation of Hidden Layers for Self-Supervised Representation Learning",
        "Lowe, Scott C.; Fuller, Anthony; Oore, Sageev; Shelhamer, Evan; Taylor, Graham W.",
        2026, "", "2603.15553",
    ),
    _paper(
        "balestriero2023diet",
        "Unsupervised Learning on a DIET: Datum IndEx as Target Free of Self-Supervision, Reconstruction, Projector "
        "Head",
        "Balestriero, Randall",
        2023, "", "2302.10260",
    ),
    _paper(
        "chen2022jigsaw",
        "Jigsaw-ViT: Learning Jigsaw Puzzles in Vision Transformer",
        "Chen, Yingyi; Shen, Xi; Liu, Yahui; Tao, Qinghua; Suykens, Johan A. K.",
        2022, "", "2207.11971",
    ),
    _paper(
        "ayoughi2025part",
        "How PARTs assemble into wholes: Learning the relative composition of images",
        "Ayoughi, Melika; Abnar, Samira; Huang, Chen; Sandino, Chris; Lala, Sayeri; Dhekane, Eeshan Gunesh; "
        "Busbridge, Dan; Zhai, Shuangfei; Thilak, Vimal; Susskind, Josh; Mettes, Pascal; Groth, Paul; Goh, Hanlin",
        2025, "", "2506.03682",
    ),
    _paper(
        "caron2022loca",
        "Location-Aware Self-Supervised Transformers for Semantic Segmentation",
        "Caron, Mathilde; Houlsby, Neil; Schmid, Cordelia",
        2022, "", "2212.02400",
    ),
    _paper(
        "xu2025nepa",
        "Next-Embedding Prediction Makes Strong Vision Learners",
        "Xu, Sihan; Ma, Ziqiao; Chai, Wenhao; Chen, Xuweiyi; Jin, Weiyang; Chai, Joyce; Xie, Saining; Yu, Stella X.",
        2025, "", "2512.16922",
    ),
    _paper(
        "yang2025pixio",
        "In Pursuit of Pixel Supervision for Visual Pre-training",
        "Yang, Lihe; Li, Shang-Wen; Li, Yang; Lei, Xinjie; Wang, Dong; Mohamed, Abdelrahman; Zhao, Hengshuang; Xu, Hu",
        2025, "", "2512.15715",
    ),
    # encoders and training
    _paper(
        "dosovitskiy2021vit",
        "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale",
        "Dosovitskiy, Alexey; Beyer, Lucas; Kolesnikov, Alexander; Weissenborn, Dirk; Zhai, Xiaohua; "
        "Unterthiner, Thomas; Dehghani, Mostafa; Minderer, Matthias; Heigold, Georg; Gelly, Sylvain; Uszkoreit, Jakob; "
        "Houlsby, Neil",
        2021, _ICLR, "2010.11929",
    ),
    _paper(
        "liu2021swin",
        "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows",
        "Liu, Ze; Lin, Yutong; Cao, Yue; Hu, Han; Wei, Yixuan; Zhang, Zheng; Lin, Stephen; Guo, Baining",
        2021, _ICCV, "2103.14030",
    ),
    _paper("wightman2019timm", "PyTorch Image Models", "Wightman, Ross", 2019, doi="10.5281/zenodo.4414861"),
    _paper(
        "loshchilov2019adamw", "Decoupled Weight Decay Regularization", "Loshchilov, Ilya; Hutter, Frank",
        2019, _ICLR, "1711.05101",
    ),
    _paper(
        "cubuk2020randaugment",
        "RandAugment: Practical Automated Data Augmentation with a Reduced Search Space",
        "Cubuk, Ekin D.; Zoph, Barret; Shlens, Jonathon; Le, Quoc V.",
        2020, _NEURIPS, "1909.13719",
    ),
    _paper(
        "hu2022lora",
        "LoRA: Low-Rank Adaptation of Large Language Models",
        "Hu, Edward J.; Shen, Yelong; Wallis, Phillip; Allen-Zhu, Zeyuan; Li, Yuanzhi; Wang, Shean; Wang, Lu; "
        "Chen, Weizhu",
        2022, _ICLR, "2106.09685",
    ),
    # protocols
    _paper(
        "wu2018instance",
        "Unsupervised Feature Learning via Non-Parametric Instance Discrimination",
        "Wu, Zhirong; Xiong, Yuanjun; Yu, Stella X.; Lin, Dahua",
        2018, _CVPR, "1805.01978",
    ),
    _paper(
        "psomas2025attention",
        "Attention, Please! Revisiting Attentive Probing for Masked Image Modeling",
        "Psomas, Bill; Christopoulos, Dionysis; Baltzi, Eirini; Kakogeorgiou, Ioannis; Aravanis, Tilemachos; "
        "Komodakis, Nikos; Karantzalos, Konstantinos; Avrithis, Yannis; Tolias, Giorgos",
        2025, "", "2506.10178",
    ),
    _paper(
        "garrido2023rankme",
        "RankMe: Assessing the Downstream Performance of Pretrained Self-Supervised Representations by Their Rank",
        "Garrido, Quentin; Balestriero, Randall; Najman, Laurent; LeCun, Yann",
        2023, _ICML, "2210.02885",
    ),
    _paper(
        "agrawal2022alphareq",
        "α-ReQ: Assessing Representation Quality in Self-Supervised Learning by measuring eigenspectrum decay",
        "Agrawal, Kumar Krishna; Mondal, Arnab Kumar; Ghosh, Arna; Richards, Blake",
        2022, _NEURIPS,
    ),
    _paper(
        "thilak2024lidar",
        "LiDAR: Sensing Linear Probing Performance in Joint Embedding SSL Architectures",
        "Thilak, Vimal; Huang, Chen; Saremi, Omid; Dinh, Laurent; Goh, Hanlin; Nakkiran, Preetum; "
        "Susskind, Joshua M.; Littwin, Etai",
        2024, _ICLR, "2312.04000",
    ),
    _paper(
        "dai2025dse",
        "Exploring Structural Degradation in Dense Representations for Self-supervised Learning",
        "Dai, Siran; Xu, Qianqian; Wen, Peisong; Liu, Yang; Huang, Qingming",
        2025, _NEURIPS, "2510.17299",
    ),
    _paper(
        "mordacq2026idest",
        "IdEst: Assessing Self-Supervised Learning Representations via Intrinsic Dimension",
        "Mordacq, Julie; Kalogeiton, Vicky; Oudot, Steve",
        2026, _ICML, "2606.03338",
    ),
    _paper(
        "xiao2018upernet",
        "Unified Perceptual Parsing for Scene Understanding",
        "Xiao, Tete; Liu, Yingcheng; Zhou, Bolei; Jiang, Yuning; Sun, Jian",
        2018, _ECCV, "1807.10221",
    ),
    _paper(
        "li2022vitdet",
        "Exploring Plain Vision Transformer Backbones for Object Detection",
        "Li, Yanghao; Mao, Hanzi; Girshick, Ross; He, Kaiming",
        2022, _ECCV, "2203.16527",
    ),
    _paper(
        "ren2015faster",
        "Faster R-CNN: Towards Real-Time Object Detection with Region Proposal Networks",
        "Ren, Shaoqing; He, Kaiming; Girshick, Ross; Sun, Jian",
        2015, _NEURIPS, "1506.01497",
    ),
    _paper(
        "he2017mask",
        "Mask R-CNN",
        "He, Kaiming; Gkioxari, Georgia; Dollár, Piotr; Girshick, Ross",
        2017, _ICCV, "1703.06870",
    ),
)  # fmt: skip
PAPERS: dict[str, Paper] = {paper.key: paper for paper in _ALL}

# Which papers were used.


# papers of the recipes, by their ``paper`` up to the bracket
RECIPE_PAPERS: dict[str, str] = {
    "Beyond Masking": "tian2022beyond",
    "CrossMAE": "fu2024crossmae",
    "DropPos": "wang2023droppos",
    "ExtreMA": "wu2023extrema",
    "I-JEPA": "assran2023ijepa",
    "Jigsaw-ViT": "chen2022jigsaw",
    "LOCA": "caron2022loca",
    "LUT": "kim2024lut",
    "MAE": "he2022mae",
    "MP3": "zhai2022mp3",
    "PART": "ayoughi2025part",
    "Pixio": "yang2025pixio",
    "SimMIM": "xie2022simmim",
    "data2vec 2.0": "baevski2023data2vec2",
}


def papers_of_task(task: str, recipe: str | None) -> list[Paper]:
    """Return the papers of a task: that of the ``recipe`` alone, if it is a paper of a task with several, else all."""
    own = TASKS[task].papers if task in TASKS else ()
    row = () if recipe is None else (RECIPE_PAPERS[recipe_named(recipe).paper.partition(" (")[0]],)
    keys = row if len(own) > 1 and row else dict.fromkeys((*own, *row))
    return [PAPERS[key] for key in keys]


def papers_of_encoder(model: str) -> list[Paper]:
    """Return the papers of an encoder by timm's name of its model."""
    return [PAPERS["liu2021swin" if "swin" in model else "dosovitskiy2021vit"], PAPERS["wightman2019timm"]]


def papers_of_protocol(protocol: str, settings: Mapping[str, Any], measures: Iterable[str] = ()) -> list[Paper]:
    """Return the papers of a protocol with the ``settings`` of a result, and of the ``measures`` that it gave."""
    keys = list(PROTOCOLS[protocol].papers if protocol in PROTOCOLS else ())
    if protocol == "segment" and settings.get("head") == "upernet":
        keys.append("xiao2018upernet")
    if protocol == "detect" and settings.get("masks"):
        keys.append("he2017mask")
    if protocol == "label-free":
        keys += [MEASURES[measure].paper for measure in measures if measure in MEASURES and MEASURES[measure].paper]
    return [PAPERS[key] for key in keys]


def bibliography(papers: Iterable[Paper]) -> str:
    """Return BibTeX entries of patchloom and of these papers, each once, in their order."""
    title = "patchloom: Pre-training of vision transformers"
    own = _entry("software", "patchloom", {"title": f"{{{title}}}", "author": "{The patchloom authors}",
                                           "version": __version__})  # fmt: skip
    return "\n\n".join([own, *(paper.bibtex() for paper in dict.fromkeys(papers))])


def _entry(kind: str, key: str, fields: Mapping[str, str]) -> str:
    lines = [f"  {name} = {{{value}}}," for name, value in fields.items() if value]
    return "\n".join([f"@{kind}{{{key},", *lines, "}"])


_TEX = {"&": r"\&", "%": r"\%", "α": r"$\alpha$", "á": r"{\'a}"}


def _tex(text: str) -> str:
    """Write a text for BibTeX, whose old programs read ASCII only."""
    return "".join(_TEX.get(letter, letter) for letter in text)
